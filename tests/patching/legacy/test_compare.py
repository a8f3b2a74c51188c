"""What counts as found: a prompt's chunk where a peer holds it, and nothing that looks like it.

Fake: a peer's blocks are numpy arrays of a made-up model; the lab has real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpatch.geometry.memory import Memory
from kvpatch.geometry.plane import Content, Counts, Plane, Strides
from kvpatch.legacy.content_proof.compare import chunks_seen, layout_shown
from kvpatch.legacy.content_proof.kernel_block_splits import PromptChunk
from kvpatch.legacy.content_proof.prover import ContentProver
from kvpatch.legacy.content_proof.readable_engines import ReadableReports
from kvpatch.legacy.content_proof.samples import Sample

pytestmark = pytest.mark.patching

KERNEL_TOKENS, CHANNELS = 16, 128
#: Of its own, each token's place turns some channels and leaves the others.
TURNED = 64


def model(tokens: list[int], start: int = 0, *, has_places: bool = True) -> Any:
    """[token, 1, channel] of a made-up layer: a token's own values, and its place in some."""
    found = np.stack([np.random.default_rng(token).normal(size=CHANNELS) for token in tokens])
    if has_places:
        places = np.arange(start, start + len(tokens))[:, None]
        found[:, -TURNED:] *= np.cos(places * np.linspace(0.3, 1.0, TURNED))
    return found.astype(np.float32)[:, None]


def seen(ours: Any, theirs: Any) -> list[tuple[int, int]]:
    """What is found of each chunk of ours in the peer's block of the same number."""
    row = 4 * CHANNELS
    strides = Strides(KERNEL_TOKENS * row, KERNEL_TOKENS * row, row, 4)
    counts = Counts(99, 1, KERNEL_TOKENS, CHANNELS)
    plane = Plane("layer", Content.KEY, 0, strides, counts, 4, 0, Memory("DRAM", 0))
    rank = SimpleNamespace(planes=(plane,))
    sampled: Any = SimpleNamespace(planes=(plane,), dtype=lambda _: torch.float32)
    raw = [values.view(np.uint8).reshape(*values.shape, 4) for values in (ours, theirs)]
    landed: Any = SimpleNamespace(
        of_block=lambda _, block: raw[1][block * KERNEL_TOKENS : (block + 1) * KERNEL_TOKENS]
    )
    sample = Sample(range(len(ours)), {("layer", Content.KEY): raw[0]})
    chunks = [PromptChunk(n, n, KERNEL_TOKENS) for n in range(len(ours) // KERNEL_TOKENS)]
    return list(chunks_seen(sampled, rank, sample, landed, chunks))  # type: ignore[arg-type]


PROMPT = list(range(4 * KERNEL_TOKENS))
ALL = [(n, n) for n in range(4)]


def test_a_prompt_is_found_in_spite_of_other_kernels_noise() -> None:
    ours = model(PROMPT)
    noise = np.random.default_rng(1).normal(scale=0.02, size=ours.shape)
    assert seen(ours, ours) == ALL
    assert seen(ours, (ours * (1 + noise)).astype(np.float32)) == ALL


def test_another_prompt_is_not_found() -> None:
    assert seen(model(PROMPT), model([token + 1000 for token in PROMPT])) == []
    assert seen(model(PROMPT), np.zeros_like(model(PROMPT))) == []


def test_the_same_tokens_elsewhere_in_another_prompt_are_not_found() -> None:
    """A client has P compute them behind others, a block further on."""
    assert seen(model(PROMPT), model(PROMPT, start=KERNEL_TOKENS)) == []


@pytest.mark.parametrize("period", [1, KERNEL_TOKENS, 2 * KERNEL_TOKENS])
def test_a_prompt_that_repeats_itself_shows_nothing(period: int) -> None:
    """Where the model does not tell places apart: any of its blocks is as good as another."""
    tokens = [token % period for token in PROMPT]
    values = model(tokens, has_places=False)
    assert seen(values, values) == []


@pytest.mark.parametrize(("is_same", "found"), [(True, "stated"), (False, None)])
def test_the_only_candidate_has_to_be_shown_too(is_same: bool, found: str | None) -> None:
    ours = model(PROMPT)
    plane = SimpleNamespace(layer="layer", content=Content.KEY, first_head=0, end_head=1)
    sampled: Any = SimpleNamespace(planes=(plane,), dtype=lambda _: torch.float32)
    raw = ours.view(np.uint8).reshape(*ours.shape, 4)
    places = np.arange(len(ours))[:, None]
    held = raw if is_same else raw[::-1]
    landed: Any = SimpleNamespace(tokens=lambda rank, of: (held, places, plane))
    sample = Sample(range(len(ours)), {("layer", Content.KEY): raw})
    ranks: Any = {"stated": None}

    assert layout_shown(sampled, ranks, sample, landed)[0] == found


def test_a_sample_that_a_peer_was_asked_for_outlives_a_burst_of_others(monkeypatch: Any) -> None:
    """Or the answer would be waited for in vain, and no other one asked for."""
    sampled: Any = SimpleNamespace(take=lambda *_: Sample(range(1), {("layer", Content.KEY): 1}))
    prover = ContentProver(SimpleNamespace(), sampled, None, ReadableReports())  # type: ignore[arg-type]
    order: Any = SimpleNamespace(computed=True)
    states, judged = ["PROC", "PROC", "DONE"], []
    read = SimpleNamespace(state=lambda: states.pop(0), release=lambda: None)
    probe: Any = SimpleNamespace(
        request_id="asked", engine_id="p", read=read, landed=SimpleNamespace(has_landed=True)
    )
    monkeypatch.setattr(prover, "_judge", lambda probe, sample: judged.append(probe.request_id))
    prover.computing("asked", "p", order)
    prover._probes.append(probe)

    for step in range(3):
        for number in range(20):
            prover.computing(f"{step} {number}", "q", order)
        prover.end_step()

    assert judged == ["asked"]
    assert not prover._probes
    assert len(prover._samples) <= 8
