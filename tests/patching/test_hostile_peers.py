"""Mutations of a handshake that a real release's metadata class carries.

Each is refused in words, or read within what the peer itself advertised, into nothing
but the request's own blocks.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kvpatch.core.errors import KvpatchError, PeerRefused, UnpairableBlocks
from kvpatch.core.installed import installed_facts
from kvpatch.core.text import one_line
from kvpatch.geometry.layout_strides import NAMED_LAYOUTS
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.staged_plan import plan_chunks
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.token_pairing import shares_of
from kvpatch.peer.agent_metadata import AgentMetadata, read_agent_metadata
from kvpatch.peer.decision import LocalCache, decide, is_compatible
from kvpatch.peer.remote_geometry import peer_regions
from kvpatch.peer.statement import DeclaredGeometry, complete
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.local_geometry import LocalGeometry
from tests.lab.releases import is_full

from ..geometry.planned import plan_runs
from .test_remote_geometry import _metadata, ours_of, planes_of, regions_of

MUTATIONS = 10_000 if is_full() else 2_000
TOKENS = 100
LOCAL_BLOCKS = (4, 2, 9, 1, 7, 3, 8)
GROUPS = (Group(frozenset("ab"), window_tokens=0),)
_NUMBERS = (
    -1, 0, 1, 2, 3, 5, 7, 16, 17, 63, 64, 128, 1000, 4096, 1 << 20, 1 << 31, 1 << 40,
    (1 << 62) - 1, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200,
)  # fmt: skip
_JUNK = (None, True, 1.5, float("nan"), "", "x" * 1000, b"\x00", {}, [], [[]], [None], object())
_LAYOUTS = ("NHD", "HND", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "NOPE", "")


def _real_metadata(layout: str = "LBHNC") -> Any:
    """What a prefill engine of 64-token blocks sends, in the release's own class."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

    stated = _metadata(agent_metadata=b"agent", ssm_sizes=(0, 0), **regions_of(layout))
    names = {field.name for field in fields(NixlAgentMetadata)}
    return NixlAgentMetadata(
        **{name: value for name, value in vars(stated).items() if name in names}
    )


def _completed(ours: LocalGeometry, metadata: Any) -> AgentMetadata:
    peer = read_agent_metadata(metadata, installed_facts(), 0, 1)
    return complete(ours, peer, DeclaredGeometry()).peer


def _mutate(rng: random.Random, metadata: Any) -> None:
    names = [field.name for field in fields(metadata)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(names)
        setattr(metadata, name, _other(rng, getattr(metadata, name)))


def _other(rng: random.Random, value: Any) -> Any:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(_JUNK)
    if isinstance(value, str):
        return rng.choice(_LAYOUTS)
    if isinstance(value, int):
        return rng.choice((*_NUMBERS, value + 1, value - 1, value * 2, value // 2))
    if isinstance(value, (list, tuple)) and value:
        changed = list(value)
        if kind < 0.3:
            changed.pop(rng.randrange(len(changed)))
        elif kind < 0.4:
            changed.append(rng.choice(_NUMBERS))
        else:
            place = rng.randrange(len(changed))
            changed[place] = _other(rng, changed[place])
        return changed
    return rng.choice((*_JUNK, *_NUMBERS))


def test_mutations_are_refused_or_harmless() -> None:
    rng = random.Random(20)
    ours = ours_of()
    planes = planes_of(ours)
    refused = read = alike = 0
    for _ in range(MUTATIONS):
        metadata = _real_metadata(rng.choice(tuple(NAMED_LAYOUTS)))
        _mutate(rng, metadata)
        blocks = tuple(rng.choice((0, 1, 3, 5, 6, 1 << 20)) for _ in range(rng.choice((1, 2, 7))))
        try:
            peer = _completed(ours, metadata)
            if is_compatible(ours, peer):
                alike += 1
                continue
            overlaps = overlaps_of(peer_regions(ours, peer), planes)
            order = ReadRequest(TOKENS, TOKENS, (LOCAL_BLOCKS,), (blocks,))
            shares = shares_of(ours, GROUPS, peer, overlaps, order)
        except (KvpatchError, UnpairableBlocks) as error:
            assert len(str(error)) > 20, "a refusal says what is wrong"
            refused += 1
            continue
        read += 1
        plan = plan_runs((s.segments, [c for x in s.overlaps for c in x.copies]) for s in shares)
        _check_remote(peer, plan.remote_address, plan.length)
        _check_local(ours, plan.local_address, plan.length)
        for planned in plan_chunks(shares, 1 << 62):
            _check_remote(peer, planned.remote_address, planned.length)
    assert refused + read + alike == MUTATIONS
    assert refused > MUTATIONS // 10 and read > MUTATIONS // 20, (refused, read, alike)


@pytest.mark.parametrize("field", ["kv_cache_layout", "attn_backend_name", "engine_id"])
def test_a_refusal_forges_no_lines_and_fills_no_disk(field: str) -> None:
    ours = ours_of()
    metadata = _real_metadata()
    setattr(metadata, field, "x\nERROR forged" + "y" * 10**7)
    peer = _completed(ours, metadata)

    unlike = replace(peer, memory_kinds=("DRAM", "VRAM"))
    refusal = decide(LocalCache(ours, ()), unlike, installed_facts())
    message = str(refusal)

    assert isinstance(refusal, PeerRefused)
    assert message.isprintable()
    assert len(message) < 5000
    assert len(one_line(peer)) < 5000
    with pytest.raises(PeerRefused) as refused:
        read_agent_metadata(replace(metadata, num_blocks=["y" * 10**7]), installed_facts(), 0, 1)
    assert len(str(refused.value)) < 1000


def _check_remote(peer: AgentMetadata, address: Any, length: Any) -> None:
    """Every run lies in one region that the peer advertised."""
    inside = np.zeros(address.size, dtype=bool)
    for start, stride, block in zip(
        peer.addresses, peer.stride_bytes, peer.block_bytes, strict=True
    ):
        end = start + (peer.blocks - 1) * stride + block
        inside |= (address >= start) & (address + length <= end)
    assert inside.all(), peer


def _check_local(ours: Any, address: Any, length: Any) -> None:
    """Every run lies in one of the request's own blocks, or in neighbouring ones."""
    inside = np.zeros(address.size, dtype=bool)
    own = np.zeros(ours.layers["a"].blocks, dtype=bool)
    own[list(LOCAL_BLOCKS)] = True
    for start, block in zip(ours.addresses, ours.block_bytes, strict=True):
        first, last = (address - start) // block, (address + length - 1 - start) // block
        for number in np.flatnonzero((first >= 0) & (last < own.size)):
            inside[number] |= bool(own[first[number] : last[number] + 1].all())
    assert inside.all()
