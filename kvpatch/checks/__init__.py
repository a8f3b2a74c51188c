"""Instruments on a load: holds and leases, and digests."""
