"""Local geometry: what this worker registered, by kind of cache and by release."""
