"""A bounded buffer in host memory, where NIXL cannot register the memory of the device."""
