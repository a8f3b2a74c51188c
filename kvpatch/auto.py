"""``import kvpatch.auto`` first thing in a launcher: enables kvpatch if the gate says so."""

from __future__ import annotations

from kvpatch.plugin import load

load()
