"""The digests that P states of a request's bytes, with which D proves what it has loaded."""
