"""What old releases need: their loads fail or are aborted without a trace, or they meet one rank.

A patch asks the module that does it here for its ``sites(facts)``, and imports it only then: a
release that needs nothing of this package imports nothing of it.
"""
