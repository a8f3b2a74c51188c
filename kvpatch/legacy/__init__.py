"""The parts that old releases need: their handshakes leave much open, and loads fail untraced.

A patch asks the module that does it here for its ``sites(facts)``, and imports it only then: a
release that needs nothing of this package imports nothing of it.
"""
