"""The commands: plan, verify, doctor."""
