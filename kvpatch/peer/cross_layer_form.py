"""The statement in a handshake that a worker's blocks are cross-layer blocks.

No release has a field for it. The layout's name carries it, which every release from
0.11.1 on compares with its own, and the attention backend's, which those <= 0.12
compare: a peer that does not know the words refuses the handshake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.cross_layer_blocks import LAYER_AXES
from kvpatch.geometry.layout_strides import Axes, InnerLayout, inner_layout_of_axes

_WORD = "kvpatch_rows"
_LETTERS = {"kv": "K", "token": "N", "head": "H", "channel": "C"}
_BY_LETTERS = {"".join(_LETTERS[axis] for axis in axes): axes for axes in LAYER_AXES}
_FORM = re.compile(rf"{_WORD}:([1-9]\d{{0,6}})x([1-9]\d{{0,6}}):([A-Z]+)(?::([0-9a-f]{{16}}))?")


@dataclass(frozen=True)
class CrossLayerForm:
    """The form of a cross-layer block, without its sizes.

    Attributes:
        block_tokens: the tokens of a kernel block; a cross-layer block holds one.
        kernel_blocks_per_block: cross-layer blocks in one of the blocks that ids count.
        axes: the axes of each layer's part.
        places: :func:`places_digest`, so that both sides have the same layers in one place;
            or :func:`packed_digest`.
    """

    block_tokens: int
    kernel_blocks_per_block: int
    axes: Axes
    places: str = ""

    def __str__(self) -> str:
        letters = "".join(_LETTERS[axis] for axis in self.axes)
        places = f":{self.places}" if self.places else ""
        return f"{_WORD}:{self.kernel_blocks_per_block}x{self.block_tokens}:{letters}{places}"

    @property
    def inner_layout(self) -> InnerLayout:
        """HND or NHD; HND where there are no heads."""
        return inner_layout_of_axes(self.axes)


def places_digest(places: Sequence[Sequence[str]]) -> str:
    """Returns a digest of the layers that share a place; empty where none do."""
    if all(len(layers) == 1 for layers in places):
        return ""
    return sha256(json.dumps([sorted(layers) for layers in places]).encode()).hexdigest()[:16]


def packed_digest(groups: Sequence[Sequence[str]]) -> str:
    """Returns a digest of the layers that each group has side by side."""
    told = json.dumps(["packed", *(list(layers) for layers in groups)])
    return sha256(told.encode()).hexdigest()[:16]


def form_in(*texts: str | None) -> CrossLayerForm | None:
    """Returns the form that a handshake's names state; None where they are a release's own."""
    for text in texts:
        if text is None or _WORD not in text:
            continue
        found = _FORM.search(text)
        if found is None or found[3] not in _BY_LETTERS:
            raise PeerRefused(
                f"a peer's blocks are said to be rows of all layers of the form {text!r}: "
                f"expected one of {', '.join(_BY_LETTERS)}",
                "use one kvpatch on both sides",
            )
        axes = _BY_LETTERS[found[3]]
        return CrossLayerForm(int(found[2]), int(found[1]), axes, found[4] or "")
    return None


def without_form(text: str | None) -> str | None:
    """A backend's name as the release has it."""
    return None if text is None else text.partition(f" {_WORD}")[0]
