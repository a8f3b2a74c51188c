"""Handshakes: agent metadata, remote geometry, and the decision that is made of both sides."""
