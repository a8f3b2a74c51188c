"""The three ways geometry says no."""

from __future__ import annotations

from kvpatch.core.errors import KvpatchError


class UnreadableGeometry(KvpatchError):
    """A tensor, a plane or a dimension order that cannot be read without guessing."""


class UnpairableBlocks(KvpatchError):
    """Block lists that do not hold the tokens that are asked for."""


class UnplannableCopy(KvpatchError):
    """Planes between which no exact copy exists, or segments that leave them."""
