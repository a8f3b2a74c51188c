"""Proof by content (<= 0.20): what a peer's blocks are, where its handshake does not say it all."""
