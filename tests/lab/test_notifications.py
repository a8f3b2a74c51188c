"""What peers notify an engine of, through NIXL: none ends it, and blocks go when D says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .host import Lab
from .releases import moves_full_blocks_only
from .stage import Raised, Stage
from .test_several_peers import SPEC, introduce

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: Whole blocks: 0.10.0 loads no others.
_TOKENS = 192
_ODD = (b"no number", b":", b"\xff\xfe:1", b"unknown:1", b"unknown:x", b"HB:", b"x" * 10_000)
#: Behind the name of a request that P keeps.
_NO_NUMBERS = ("", "x", "0", "-1", "1.0", "9" * 5000)


def test_odd_notifications_end_no_engine(stage: Stage) -> None:
    prefill = stage.start(replace(SPEC, patched=True))
    decode = stage.decode(SPEC, patched=False)
    introduce(decode, stage.prompts(1, _TOKENS), prefill)
    prompt = stage.prompt(_TOKENS)
    asks = prefill.compute(prompt)
    known = [f"{prompt.name}:{number}".encode() for number in _NO_NUMBERS]

    decode.call("notify", prefill.engine_id, [*_ODD, *known])
    assert not prefill.heard([prompt], seconds=1)

    decode.ask(*asks)
    decode.must_hold(prompt)
    assert prefill.heard([prompt]) == {prompt.name}
    assert any("says nothing to it" in line for line in prefill.call("warned"))


@pytest.mark.parametrize("number", ["x", None])
def test_they_end_stocks(stage: Stage, lab: Lab, number: str | None) -> None:
    """What is mended here, and that the tests see it: of a request that P keeps, or of none."""
    prefill, decode = stage.start(SPEC), stage.decode(SPEC, patched=False)
    introduce(decode, stage.prompts(1, _TOKENS), prefill)
    prompt = stage.prompt(_TOKENS)
    prefill.compute(prompt)
    none = b"unknown:1" if moves_full_blocks_only(lab.release) else b"no number"
    message = none if number is None else f"{prompt.name}:{number}".encode()

    decode.call("notify", prefill.engine_id, [message])

    with pytest.raises(Raised, match="KeyError" if message == b"unknown:1" else "ValueError"):
        prefill.heard([prompt], seconds=60)
