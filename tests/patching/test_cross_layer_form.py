"""What a handshake says of cross-layer blocks, there and back."""

from __future__ import annotations

import pytest

from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.cross_layer_blocks import LAYER_AXES
from kvpatch.peer.agent_metadata import CrossLayerForm, form_in, places_digest, without_form

_PLACES = (("layers.0", "layers.1"), ("layers.2", "layers.3"))


@pytest.mark.parametrize("axes", LAYER_AXES)
@pytest.mark.parametrize("places", ["", places_digest(_PLACES)])
def test_is_read_as_it_was_written(axes, places):
    form = CrossLayerForm(16, 2, axes, places)

    assert form_in(None, f"FLASH_ATTN {form}") == form
    assert without_form(f"FLASH_ATTN {form}") == "FLASH_ATTN"


def test_layers_that_are_alone_are_not_told():
    assert places_digest((("layers.0",), ("layers.1",))) == ""
    assert str(CrossLayerForm(16, 1, LAYER_AXES[0])).count(":") == 2


def test_other_layers_side_by_side_are_told_apart():
    swapped = (("layers.1", "layers.0"), _PLACES[1])
    other = (("layers.0", "layers.2"), ("layers.1", "layers.3"))

    assert places_digest(swapped) == places_digest(_PLACES)  # one place, in whichever order
    assert places_digest(other) != places_digest(_PLACES)
    assert places_digest(_PLACES[::-1]) != places_digest(_PLACES)


def test_unknown_axes_are_refused():
    with pytest.raises(PeerRefused, match="expected one of"):
        form_in("kvpatch_rows:1x16:NNNN")
