"""kvpatch's own version, apart, so that the session need not import the package's front."""

from __future__ import annotations

__version__ = "0.1.0"
