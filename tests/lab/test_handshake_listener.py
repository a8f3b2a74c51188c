"""What comes in at P's side channel: odd messages end no listener, and get no memory's address."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from packaging.version import Version

from .host import Lab
from .side_channel import GET, ask, ask_patiently, question
from .stage import Stage
from .test_several_peers import SPEC

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
    for frames in odd:
        answer = ask(prefill.port, *frames)
        if Version(lab.release) >= Version("0.11.1"):  # <= 0.11.0 all that ask are answered
            assert answer is None or right[1] not in answer, frames
        again = ask_patiently(prefill.port, b"", good)
        assert again is not None, frames
        assert again[1] == right[1]


@pytest.mark.on(since="0.11.1")  # else: each rank answers for itself
def test_a_rank_that_there_is_not_is_answered_with_nothing(stage: Stage, lab: Lab) -> None:
    prefill = stage.start(replace(SPEC, patched=True))

    answer = ask_patiently(prefill.port, b"", question(lab.release, 1))

    assert answer is not None
    assert answer[1] == b""
    assert ask_patiently(prefill.port, b"", question(lab.release, 0)) is not None


def test_they_end_stocks(stage: Stage, lab: Lab) -> None:
    """What is mended here, and that the tests see it."""
    prefill = stage.prefill(SPEC)
    good = question(lab.release, 0)
    assert ask_patiently(prefill.port, b"", good) is not None

    if Version(lab.release) < Version("0.11.1"):
        ask(prefill.port, b"one frame")
    else:
        ask(prefill.port, b"", question(lab.release, 1))

    assert ask(prefill.port, b"", good) is None
