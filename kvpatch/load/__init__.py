"""A read from a peer of another geometry: token pairing, the reader, its NIXL agent."""
