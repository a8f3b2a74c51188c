"""A peer's compatibility hash: what it is made of, which factors differ, and what is accepted."""
