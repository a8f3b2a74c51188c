"""kvcached's memory: its pools, its pages, and the network cards that would keep them."""
