"""What old releases need: whose handshakes leave much open, whose loads fail without a trace.

A patch asks the module that does it here for its ``sites(facts)``, and imports it only then: a
release that needs nothing of this package imports nothing of it.
"""
