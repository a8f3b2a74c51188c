"""Models whose layers with windows have another number of KV heads than those with full attention.

Over unlike ranks the heads of some layers may be shared out, and those of others copied. The
release then plans blocks of other tokens on each side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpatch.core.releases import FACTS

from .case import MIRRORED, Case, EngineSpec, Outcome
from .host import Lab

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.18")]

_BASE = EngineSpec(layers=4, planned_blocks=300, head_dim=16)
_MIMO = replace(_BASE, window_tokens=(0, 64), kv_heads=4, window_shape=(8, 16))
_WIDE = replace(_BASE, window_tokens=(0, 64), kv_heads=2, head_dim=64, window_shape=(4, 32))
MODELS = {
    "MiMo-V2": _MIMO,
    "Gemma 4": replace(_BASE, window_tokens=(64, 0), kv_heads=8, full_shape=(2, 32)),
    "wide": _WIDE,
    "wide, few heads": replace(_WIDE, kv_heads=1, window_shape=(2, 32)),
    "as many heads": replace(_WIDE, head_dim=32, window_shape=(2, 16)),
}
#: By model, pairs of which every layer has as many times the heads of the other side, or as many.
_READ = {
    "MiMo-V2": [(1, 2), (2, 4), (4, 2)],
    "Gemma 4": [(1, 2), (2, 1)],
    "wide": [(2, 1)],
    "wide, few heads": [(2, 4)],
    "as many heads": [(2, 4), (1, 4)],
}
#: Pairs of which they have not.
_UNLIKE = {
    "MiMo-V2": [(4, 8), (8, 4), (2, 8)],
    "Gemma 4": [(4, 2), (2, 4)],
    "wide": [(2, 4), (1, 4)],
    "wide, few heads": [(1, 2), (2, 1)],
}
_SEVERAL = "layers of several shapes or numbers of KV heads"


def _case(model: str, ranks: tuple[int, int], layout: str = "HND") -> Case:
    engine = replace(MODELS[model], layout=layout, packs_pages=layout in ("BLHNC", "BLNHC"))
    sides = (replace(engine, tp_size=size) for size in ranks)
    return Case(f"{model}, {ranks}, {layout}", *sides, 150)


def _pairs(table: dict[str, list[tuple[int, int]]]) -> list[tuple[str, tuple[int, int]]]:
    return [(model, ranks) for model, pairs in table.items() for ranks in pairs]


def _skip_shared(lab: Lab, model: str) -> None:
    """Skips a model of which ranks of D share heads, where the release reads other ones."""
    if model == "as many heads" and not FACTS[lab.release].reads_its_share:
        pytest.skip("this release reads other heads, in any model, and kvpatch refuses these")


def _is_as_stock(lab: Lab, case: Case) -> None:
    stock, patched = lab.run(case), lab.on_d(case)

    stock.must_be("identical")
    assert replace(patched, seconds=0.0) == replace(stock, seconds=0.0)


@pytest.mark.parametrize(("model", "ranks"), _pairs(_READ))
def test_all_layers_share_out_their_heads_alike(
    lab: Lab, model: str, ranks: tuple[int, int]
) -> None:
    _skip_shared(lab, model)
    _is_as_stock(lab, _case(model, ranks))


@pytest.mark.parametrize(("model", "ranks"), _pairs(_READ))
@pytest.mark.on(listens_in_scheduler=True)
def test_digests_of_each_layers_own_heads(lab: Lab, model: str, ranks: tuple[int, int]) -> None:
    _skip_shared(lab, model)
    case = _case(model, ranks)
    prefill, decode = (
        replace(side, patched=True, settings=(("KVPATCH_DIGEST", "all"),))
        for side in (case.prefill, case.decode)
    )

    lab.run(replace(case, prefill=prefill, decode=decode)).must_be("identical")


@pytest.mark.parametrize(("model", "ranks"), _pairs(_UNLIKE))
def test_some_layers_heads_are_copied(lab: Lab, model: str, ranks: tuple[int, int]) -> None:
    """Their blocks have other tokens on each side."""
    case = _case(model, ranks)

    assert lab.run(case).outcome != "identical"
    lab.on_d(case).must_be("refused")


@pytest.mark.parametrize(
    ("ranks", "outcome"), [((4, 8), "refused"), ((8, 16), "identical"), ((16, 8), "identical")]
)
@pytest.mark.parametrize("tokens", [(16, 32), (32, 16)], ids=["16 to 32", "32 to 16"])
def test_unlike_blocks_of_a_head_each(
    lab: Lab, ranks: tuple[int, int], outcome: Outcome, tokens: tuple[int, int]
) -> None:
    """All layers of D look alike; from 8 ranks on all of P's do, too."""
    case = _case("MiMo-V2", ranks)
    prefill, decode = (
        replace(side, block_tokens=size)
        for side, size in zip((case.prefill, case.decode), tokens, strict=True)
    )

    lab.on_d(replace(case, prefill=prefill, decode=decode)).must_be(outcome)


@pytest.mark.parametrize(("model", "ranks"), _pairs(_READ))
@pytest.mark.parametrize("tokens", [(16, 32), (32, 128), (64, 16)], ids=str)
@pytest.mark.parametrize("prompt", [100, 257])
def test_unlike_blocks_and_ranks(
    lab: Lab, model: str, ranks: tuple[int, int], tokens: tuple[int, int], prompt: int
) -> None:
    """Each layer's heads are found by its own number on all ranks."""
    case = _case(model, ranks)
    prefill, decode = (
        replace(side, block_tokens=size)
        for side, size in zip((case.prefill, case.decode), tokens, strict=True)
    )
    case = replace(case, prefill=prefill, decode=decode, prompt_tokens=prompt)

    lab.on_d(case).must_be("identical")


# -- layers inside blocks, with pages of their own bytes ---------------------------------------

_NAMED = pytest.mark.on(names_layouts=True)


@_NAMED
@pytest.mark.parametrize(
    ("model", "ranks"), [("wide", (1, 2)), ("wide", (2, 1)), ("as many heads", (2, 4))]
)
def test_pages_of_one_size_or_of_copies(lab: Lab, model: str, ranks: tuple[int, int]) -> None:
    _is_as_stock(lab, _case(model, ranks, "BLHNC"))


@_NAMED
@pytest.mark.parametrize(
    ("model", "ranks"),
    [("Gemma 4", (1, 2)), ("Gemma 4", (2, 1)), ("MiMo-V2", (2, 4)), ("as many heads", (1, 2))],
)
def test_a_share_of_pages_of_several_sizes(lab: Lab, model: str, ranks: tuple[int, int]) -> None:
    """The release takes the share of a smaller page from the largest one's region."""
    case = _case(model, ranks, "BLHNC")

    assert lab.run(case).outcome == "corrupt"
    lab.on_d(case).must_be("refused", _SEVERAL)


@pytest.mark.on(since="0.30")
@pytest.mark.parametrize(("model", "layout"), [("wide, few heads", "BLNHC"), ("wide", "BLHNC")])
@pytest.mark.parametrize("shared", [0, 1], ids=["read", "unread"])
def test_a_region_of_another_group(lab: Lab, model: str, layout: str, shared: int) -> None:
    """In BLNHC a page of one head has a region, and a page of several at its place has none.

    A cache that kvpatch does not read into is refused then.
    """
    case = _case(model, (1, 1), layout)
    sides = (replace(side, sharing_layers=shared) for side in (case.prefill, case.decode))
    case = Case(case.name, *sides, 257)
    misses = layout == "BLNHC"

    lab.run(case).must_be("corrupt" if misses else "identical")
    if misses and shared:
        lab.on_d(case).must_be("refused", "of another cache group")
    else:
        lab.on_d(case).must_be("identical", moved=257)


# -- caches that vLLM alone reads -----------------------------------------------------------------

_MIRRORED = {"device": MIRRORED, "own_scheduler": True}


@pytest.mark.parametrize(
    ("model", "ranks"), [("MiMo-V2", (2, 4)), ("MiMo-V2", (4, 8)), ("Gemma 4", (4, 2))]
)
@pytest.mark.parametrize(
    "unread",
    [
        pytest.param({"sharing_layers": 1}, id="shared", marks=pytest.mark.on(since="0.24")),
        pytest.param(_MIRRORED, id="mirrored", marks=pytest.mark.on(since="0.26", before="0.30")),
    ],
)
def test_caches_that_kvpatch_does_not_read_into(
    lab: Lab, unread: dict[str, Any], model: str, ranks: tuple[int, int]
) -> None:
    case = _case(model, ranks)
    case = Case(case.name, *(replace(side, **unread) for side in (case.prefill, case.decode)), 150)
    stock, patched = lab.run(case), lab.on_d(case)

    if ranks in _READ[model]:
        stock.must_be("identical")
        patched.must_be("identical")
    else:
        assert stock.outcome != "identical", stock
        patched.must_be("refused", "several shapes or numbers of KV heads")


@pytest.mark.on(before="0.26")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 4)])
def test_a_mirror_of_another_layout_than_it_states(
    lab: Lab, ranks: tuple[int, int], layout: str
) -> None:
    """It is NHD, and the model's heads are one: those windows are two."""
    case = _case("wide, few heads", ranks, layout)
    sides = (replace(side, **_MIRRORED) for side in (case.prefill, case.decode))
    mirrored = Case(case.name, *sides, 150)
    outcome: Outcome = "identical" if ranks == (2, 4) else "refused"

    assert (lab.run(mirrored).outcome == "identical") == (outcome == "identical")
    lab.on_d(mirrored).must_be(outcome)
