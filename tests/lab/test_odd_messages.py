"""What comes in at an engine from anybody: odd messages end none, and get no memory's address.

At P's side channel, and through NIXL, by which D says that blocks may go.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
from packaging.version import Version

from .host import Lab
from .releases import moves_full_blocks_only
from .side_channel import GET, ask, ask_patiently, question
from .stage import Raised, Stage
from .test_several_peers import SPEC, introduce

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]


def test_odd_messages_end_no_listener(stage: Stage, lab: Lab) -> None:
    prefill = stage.start(replace(SPEC, patched=True))
    good = question(lab.release, 0)
    odd = [
        (b"one frame",),
        (b"", good, b"a third"),
        (b"", b"\xc1"),
        (b"", b"\x91" * 100_000),
        (b"", msgspec.msgpack.encode(7)),
        (b"", msgspec.msgpack.encode((GET, *[[]] * 2))),
        (b"", msgspec.msgpack.encode((GET, *["x"] * 5))),
    ]

    right = ask_patiently(prefill.port, b"", good)
    assert right is not None
    with ThreadPoolExecutor() as pool:  # each waits for an answer that may not come
        answers = pool.map(lambda frames: ask(prefill.port, *frames), odd)
    for frames, answer in zip(odd, answers, strict=True):
        if Version(lab.release) >= Version("0.11.1"):  # <= 0.11.0 all that ask are answered
            assert answer is None or right[1] not in answer, frames
    again = ask_patiently(prefill.port, b"", good)
    assert again is not None
    assert again[1] == right[1]


@pytest.mark.on(since="0.11.1")  # else: each rank answers for itself
def test_a_rank_that_there_is_not_is_answered_with_nothing(stage: Stage, lab: Lab) -> None:
    prefill = stage.start(replace(SPEC, patched=True))

    answer = ask_patiently(prefill.port, b"", question(lab.release, 1))

    assert answer is not None
    assert answer[1] == b""
    assert ask_patiently(prefill.port, b"", question(lab.release, 0)) is not None


def test_they_end_stocks_listener(stage: Stage, lab: Lab) -> None:
    prefill = stage.prefill(SPEC)
    good = question(lab.release, 0)
    assert ask_patiently(prefill.port, b"", good) is not None

    if Version(lab.release) < Version("0.11.1"):
        ask(prefill.port, b"one frame")
    else:
        ask(prefill.port, b"", question(lab.release, 1))

    assert ask(prefill.port, b"", good) is None


# -- notifications --------------------------------------------------------------------------

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
def test_notifications_end_stock(stage: Stage, lab: Lab, number: str | None) -> None:
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
