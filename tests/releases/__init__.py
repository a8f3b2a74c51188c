"""vLLM's releases as source trees: fetching them, and where they lie.

The contract tests read these trees, the lab imports them. Nothing of them is
committed: they live in a cache that git ignores.
"""
