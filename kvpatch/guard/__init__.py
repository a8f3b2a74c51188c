"""The limits on what clients and peers may send."""
