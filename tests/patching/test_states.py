"""Recurrent state: its pages here and at a peer, and which of a request's blocks has it."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from kvpatch.core.errors import PeerRefused, ReadRefused
from kvpatch.core.releases import FACTS
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides
from kvpatch.geometry.state_shares import Part, SharedState
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.token_pairing import filled_state, state_pairs, states_plan
from kvpatch.peer.agent_metadata import AgentMetadata, CrossLayerForm
from kvpatch.peer.remote_ranks import is_misread, states_of_peer
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.recurrent_state import StateDivision, StatePages, pages_of, state_division
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import BLOCKS_FIRST

from .test_remote_geometry import ours_of

BLOCKS, PAGE_BYTES = 5, 1024
SHAPES = ((4, 3), (2, 5))
SIZES = (48, 20)
SPEC = SimpleNamespace(shapes=SHAPES, dtypes=(torch.float32, torch.bfloat16))
GROUPS = (
    Group(frozenset({"layers.0", "layers.2"}), 0),
    Group(frozenset({"layers.1", "layers.3"}), 0, has_state=True),
)


def _order(local: tuple[int, ...], remote: tuple[int, ...], tokens: int = 60) -> ReadRequest:
    return ReadRequest(tokens, tokens, ((1,), local), ((1,), remote))


class TestWhichBlock:
    """Blocks of P's have 24 tokens."""

    @pytest.mark.parametrize(
        ("tokens", "remote"),
        [
            (60, (7,)),
            (60, (0, 0, 7)),
            (60, (0, 6, 7)),  # the state of a chunk before
            (72, (0, 6, 7)),
            (60, (0, 6, 7, 8, 9)),  # scratch for drafted tokens
            (48, (0, 7, 8)),
            (30, (0, 7)),
        ],
    )
    def test_the_one_behind_the_last_token(self, tokens, remote):
        (found,) = state_pairs(GROUPS, _peer(), _order((3,), remote, tokens))

        assert found == (GROUPS[1], 7, 3)

    def test_none_where_nothing_is_to_be_filled(self):
        assert list(state_pairs(GROUPS, _peer(), _order((), (7,)))) == []

    @pytest.mark.parametrize(
        ("local", "remote"),
        [
            ((3,), (6, 7)),  # a state of before, or scratch behind it
            ((3,), (5, 6, 7)),
            ((3,), (0, 7)),  # too few for its tokens
            ((3,), (6, 7, 0)),
            ((3,), (0,)),
            ((3,), ()),
            ((3, 4), (7,)),
            ((3, 4), (6, 7)),  # a state at each block
        ],
    )
    def test_several_are_refused(self, local, remote):
        with pytest.raises(ReadRefused, match="--no-enable-prefix-caching .* no draft model"):
            list(state_pairs(GROUPS, _peer(), _order(local, remote)))


@pytest.mark.parametrize(
    ("local", "found"), [((3,), 3), ((0, 0, 3), 3), ((0, 2, 3), None), ((0,), None), ((), None)]
)
def test_the_block_that_d_fills(local, found):
    assert filled_state(local) == found


def _apart(items: torch.Tensor) -> list[torch.Tensor]:
    first = items.view(torch.float32).as_strided((BLOCKS, 4, 3), (PAGE_BYTES // 4, 3, 1))
    second = items.view(torch.bfloat16).as_strided(
        (BLOCKS, 2, 5), (PAGE_BYTES // 2, 5, 1), SIZES[0] // 2
    )
    return [first, second]


class TestPages:
    def test_of_a_tensor_for_each_state_and_of_a_tensor_of_pages(self):
        memory = torch.zeros(BLOCKS * PAGE_BYTES, dtype=torch.uint8)
        expected = StatePages(memory.data_ptr(), PAGE_BYTES, BLOCKS, SIZES)

        assert pages_of(_apart(memory), SPEC) == expected
        assert pages_of(memory.view(torch.int8).view(BLOCKS, 1, 1, PAGE_BYTES), SPEC) == expected

    def test_pages_too_small_and_states_with_a_gap_are_none(self):
        first, second = _apart(torch.zeros(BLOCKS * PAGE_BYTES, dtype=torch.uint8))
        small = torch.zeros(BLOCKS, 1, 1, sum(SIZES) - 1, dtype=torch.int8)

        for other in (small, [first, second[1:]], [first, second[:, :1]], [second, first]):
            assert pages_of(other, SPEC) is None


def _plane(layer: str, address: int) -> LayerCache:
    counts = Counts(BLOCKS, 2, 4, 16)
    strides = Strides(PAGE_BYTES, 4 * 16 * 4, 16 * 4, 4)
    plane = Plane(layer, Content.KEY, address, strides, counts, 4, 0, Memory("DRAM", 0))
    return LayerCache(BLOCKS_FIRST, (plane, replace(plane, content=Content.VALUE)))


def _ours() -> LocalGeometry:
    starts = 10_000, 20_000
    layers = {f"layers.{2 * n}": _plane(f"layers.{2 * n}", start) for n, start in enumerate(starts)}
    return replace(
        ours_of(layout="HND"),
        layers=layers,
        addresses=starts,
        block_bytes=(PAGE_BYTES,) * 2,
        block_tokens=4,
        total_heads=2,
        units=None,
        cross_layer_groups=None,
        groups=tuple(group.layers for group in GROUPS),
        cross_layer_places="0123456789abcdef",
        states={
            f"layers.{2 * n + 1}": StatePages(start, PAGE_BYTES, BLOCKS, SIZES)
            for n, start in enumerate(starts)
        },
    )


def _peer(**changes: object) -> AgentMetadata:
    plain = AgentMetadata(
        "p", 0, 1, 8, 3, "HND", 12, (50_000, 90_000), (2048,) * 2, (2048,) * 2, None, 0,
        state_bytes=SIZES,
    )  # fmt: skip
    return replace(plain, **changes)


def _rows(places: str) -> dict[str, object]:
    """What a peer with cross-layer blocks states otherwise."""
    form = CrossLayerForm(8, 3, ("kv", "token", "head", "channel"), places)
    lengths = (4096,)
    return {"form": form, "addresses": (50_000,), "block_bytes": lengths, "stride_bytes": lengths}


class TestAPeersPages:
    @pytest.mark.parametrize("names", [("layers.2", "layers.0"), ("layers.3", "layers.1")])
    def test_in_regions_of_another_order_by_their_names(self, names):
        """From 0.30 on; a region may be named after a layer with states."""
        found = states_of_peer(_ours(), _peer(region_names=names))

        assert found["layers.1"].pages.address == 90_000
        assert found["layers.3"].pages.address == 50_000

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"region_names": ("layers.0", "other")}, r"named layers\.0, other: use one model"),
            ({"tp_size": 2}, "one --tensor-parallel-size"),
            ({"state_bytes": (48, 40)}, r"take \(48, 40\) bytes and ours \(48, 20\)"),
            ({"state_bytes": ()}, "--mamba-ssm-cache-dtype"),
            ({"block_bytes": (20, 20)}, "take 68 bytes, and a block of its has 60"),
            (_rows("fedcba9876543210"), "other shapes or types than ours"),
        ],
    )
    def test_others_are_refused(self, changes, words):
        with pytest.raises(PeerRefused, match=words):
            states_of_peer(_ours(), _peer(**changes))


def _spec(kind: object, *shapes: tuple[int, ...]) -> SimpleNamespace:
    return SimpleNamespace(
        shapes=shapes, dtypes=(torch.bfloat16, torch.float32), mamba_type=kind, tp_replicated=False
    )


class _Type(Enum):
    """vLLM's, from 0.21 on; its values are paths."""

    MAMBA1 = "a.path"
    MAMBA2 = "a.path2"
    GDN_ATTN = "a.path3"
    SHORT_CONV = "a.path4"


_MODEL = SimpleNamespace(mamba_n_groups=2)
_NEWEST = FACTS["0.33.0"]


class TestDivision:
    """Of 4 heads of 8 channels in all, states of 4, kernels of 4."""

    def test_groups_of_one_rank_are_all_there_are(self):
        found = state_division(_spec("mamba2", (48, 3), (4, 8, 4)), 1, None, _NEWEST)

        assert found.states[0].parts == (Part(32), Part(8), Part(8))

    def test_gated_delta_nets_whatever_a_key_head_is(self):
        """vLLM divides channels of keys, and asks for no whole number of states of the other."""
        found = state_division(_spec(_Type.GDN_ATTN, (8, 3), (1, 4, 4)), 2, None, _NEWEST)

        assert found.states[0].parts == (Part(4), Part(4), Part(8))

    @pytest.mark.parametrize(
        ("spec", "ranks", "model", "words"),
        [
            (_spec(_Type.MAMBA2, (24, 3), (2, 8, 4)), 2, None, "says None groups"),
            (_spec(_Type.MAMBA2, (24, 3), (2, 8, 4)), 2, SimpleNamespace(n_groups=4), "says 4 gr"),
            (_spec(_Type.MAMBA2, (16, 3), (2, 8, 4)), 2, _MODEL, "are not MAMBA2's"),
            (_spec(_Type.MAMBA2, (23, 3), (2, 8, 4)), 2, _MODEL, "are not MAMBA2's"),
            (_spec(_Type.MAMBA2, (22, 3), (2, 8, 4)), 2, _MODEL, "are not MAMBA2's"),
            (_spec(_Type.GDN_ATTN, (33, 3), (4, 4, 4)), 2, None, "are not GDN_ATTN's"),
            (_spec(_Type.GDN_ATTN, (16, 3), (4, 4, 4)), 2, None, "are not GDN_ATTN's"),
            (_spec(_Type.MAMBA1, (16, 3), (8, 8)), 2, None, "are not Mamba1's"),
            (_spec(_Type.SHORT_CONV, (16, 3), (8, 8)), 2, None, "states of SHORT_CONV are none"),
            (_spec(_Type.MAMBA2, (24, 3)), 2, _MODEL, "1 states of MAMBA2"),
            (_spec(_Type.MAMBA2, (24, 3), (2, 8, 4), (2, 6, 8)), 2, _MODEL, "3 states of MAMBA2"),
        ],
    )
    def test_others_are_divided_by_nobody(self, spec, ranks, model, words):
        found = state_division(spec, ranks, model, _NEWEST)

        assert words in found.reason
        assert found.states == ()

    def test_replicated_states_and_old_releases_neither(self):
        spec = _spec(_Type.MAMBA2, (24, 3), (2, 8, 4))
        assert "innermost" in state_division(spec, 2, _MODEL, FACTS["0.19.1"]).reason

        spec.tp_replicated = True
        assert "whole on every rank" in state_division(spec, 2, _MODEL, _NEWEST).reason


#: Of a float32 convolution of 4 channels, and of 4 heads of 5 bytes: what SIZES are on one rank.
_DIVISION = StateDivision(
    (SharedState(12, (Part(2), Part(2, is_copied=True))), SharedState(5, (Part(4),))), reason=""
)


def _ours_divided(division: StateDivision = _DIVISION) -> LocalGeometry:
    ours = _ours()
    states = {name: replace(own, division=division) for name, own in ours.states.items()}
    return replace(ours, states=states)


class TestAPeerOfOtherRanks:
    def test_what_is_copied_is_never_the_releases(self):
        ours, peer = _ours_divided(), _peer(tp_size=2)

        assert is_misread(ours, peer)
        assert not is_misread(ours, replace(peer, tp_size=1))
        shares = StateDivision((SharedState(12, (Part(4),)), SharedState(5, (Part(4),))), "")
        assert not is_misread(_ours_divided(shares), peer)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"state_bytes": SIZES}, r"take \(48, 20\) bytes and ours \(36, 10\)"),
            ({"tp_size": 3}, "cannot be shared out over 3 ranks"),
            ({"releases": ("0.19.1",)}, "channels innermost"),
            (_rows("0123456789abcdef"), "contiguous layout .*one --tensor-parallel-size"),
        ],
    )
    def test_others_are_refused(self, changes, words):
        peer = _peer(**{"tp_size": 2, "state_bytes": (36, 10), **changes})

        with pytest.raises(PeerRefused, match=words):
            states_of_peer(_ours_divided(), peer)

    def test_what_nobody_can_divide_is_refused_by_name(self):
        ours = _ours_divided(StateDivision(reason="2 states of LINEAR are none"))

        with pytest.raises(PeerRefused, match=r"layer layers\.1 .* 2 states of LINEAR"):
            states_of_peer(ours, _peer(tp_size=2))


@pytest.mark.parametrize(("local", "remote"), [(1, 4), (5, 1)])
def test_blocks_that_are_not_there_are_refused(local, remote):
    ours, peer = _ours(), _peer()
    theirs = states_of_peer(ours, peer)

    with pytest.raises(ReadRefused, match="of 4 and 5"):
        states_plan(GROUPS, peer, _order((local,), (remote,)), ours.states, theirs)
