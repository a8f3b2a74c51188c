"""What comes in at P's side channel: odd messages end no listener, and get no memory's address."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
import zmq
from packaging.version import Version

from kvpatch.patches import SLUGS

from .host import Lab
from .stage import Actor, Stage
from .test_several_peers import SPEC

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_GET = b"get_meta_msg"
_ANSWER_MS = 1500


@pytest.fixture
def stage(lab: Lab) -> Iterator[Stage]:
    with Stage(lab) as opened:
        yield opened


def _question(release: str, rank: int) -> bytes:
    """As a D of this release asks for a rank."""
    if Version(release) < Version("0.11.1"):
        return _GET
    ranks = (rank,) if Version(release) < Version("0.26") else (0, rank)
    return msgspec.msgpack.encode((_GET, *ranks))


def _ask(prefill: Actor, *frames: bytes) -> list[bytes] | None:
    """The answer's frames; None where there is none in time."""
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as asking:
            asking.linger = 0  # where nobody listens
            asking.connect(f"tcp://127.0.0.1:{prefill.port}")
            asking.send_multipart(frames)
            return asking.recv_multipart() if asking.poll(_ANSWER_MS) else None
    finally:
        context.destroy(linger=0)


def test_odd_messages_end_no_listener(stage: Stage, lab: Lab) -> None:
    prefill = stage.start(replace(SPEC, patched=True, patches=SLUGS))
    good = _question(lab.release, 0)
    odd = [
        (b"one frame",),
        (b"", good, b"a third"),
        (b"", b"\xc1"),
        (b"", msgspec.msgpack.encode(7)),
        (b"", msgspec.msgpack.encode((_GET, *[[]] * 2))),
        (b"", msgspec.msgpack.encode((_GET, *["x"] * 5))),
    ]

    right = _ask(prefill, b"", good)
    assert right is not None
    for frames in odd:
        answer = _ask(prefill, *frames)
        if Version(lab.release) >= Version("0.11.1"):  # <= 0.11.0 all that ask are answered
            assert answer is None or right[1] not in answer, frames
        again = _ask(prefill, b"", good)
        assert again is not None, frames
        assert again[1] == right[1]


def test_a_rank_that_there_is_not_is_answered_with_nothing(stage: Stage, lab: Lab) -> None:
    if Version(lab.release) < Version("0.11.1"):
        pytest.skip("each rank answers for itself")
    prefill = stage.start(replace(SPEC, patched=True, patches=SLUGS))

    answer = _ask(prefill, b"", _question(lab.release, 1))

    assert answer is not None
    assert answer[1] == b""
    assert _ask(prefill, b"", _question(lab.release, 0)) is not None


def test_they_end_stocks(stage: Stage, lab: Lab) -> None:
    """What is mended here, and that the tests see it."""
    prefill = stage.prefill(SPEC)
    good = _question(lab.release, 0)
    assert _ask(prefill, b"", good) is not None

    if Version(lab.release) < Version("0.11.1"):
        _ask(prefill, b"one frame")
    else:
        _ask(prefill, b"", _question(lab.release, 1))

    assert _ask(prefill, b"", good) is None
