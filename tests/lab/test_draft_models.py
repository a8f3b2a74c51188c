"""A draft model whose heads have another shape than the target's, in the same cache group.

The release gives all of the group's layers blocks of one number of tokens, and each a region of its
own bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec
from .host import Lab

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.23")]

_HEADS = EngineSpec(
    layers=3, kv_heads=8, head_dim=32, draft_shape=(4, 16), own_scheduler=True, planned_blocks=60
)
MODELS = {
    "heads": _HEADS,
    "more heads": replace(_HEADS, kv_heads=4, draft_shape=(8, 32)),
    "as many bytes": replace(_HEADS, draft_shape=(4, 64)),
    "latents": replace(_HEADS, family="mla", head_dim=64),
    # Of which a rank has as many as its share of the number that the target's model states.
    "latents and their heads": replace(_HEADS, family="mla", head_dim=64, draft_shape=(8, 16)),
}
SIZES = {"16 to 64": (16, 64), "64 to 16": (64, 16), "96 to 64": (96, 64)}
_NAMED = pytest.mark.on(names_layouts=True)


def _case(name: str, sizes: tuple[int, int], hit: bool, ranks: tuple[int, int] = (1, 1)) -> Case:
    sides = (
        replace(MODELS[name], block_tokens=tokens, tp_size=size)
        for tokens, size in zip(sizes, ranks, strict=True)
    )
    return Case(f"{name}, {sizes}, {ranks}", *sides, 150, sizes[1] * hit)


@pytest.fixture(params=MODELS)
def model(lab: Lab, request: pytest.FixtureRequest) -> str:
    # <= 0.28 all of a model's heads have to have as many bytes a block.
    if Version(lab.release) < Version("0.29") and request.param in ("heads", "more heads"):
        pytest.skip("no engine of this release starts with such a model")
    return str(request.param)


@pytest.mark.parametrize("hit", [False, True], ids=["no hit", "a hit"])
@pytest.mark.parametrize("name", SIZES)
def test_unlike_blocks(lab: Lab, model: str, name: str, hit: bool) -> None:
    case = _case(model, SIZES[name], hit)

    report = lab.on_d(case)

    report.must_be("identical", moved=150 - case.prefix_hit_tokens)
    assert min(report.noticed.values()) > 0


@pytest.mark.parametrize("name", ["16 to 64", "64 to 16"])
def test_two_ranks_each(lab: Lab, model: str, name: str) -> None:
    lab.on_d(_case(model, SIZES[name], hit=True, ranks=(2, 2))).must_be("identical")


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=["1 to 2", "2 to 1"])
def test_other_ranks(lab: Lab, model: str, ranks: tuple[int, int]) -> None:
    """A handshake names no layer's heads; where they are the model's, its bytes are enough.

    From 0.32 on the release joins what P's fewer ranks have, and is handed what it pairs rightly.
    """
    report = lab.on_d(_case(model, (16, 64), hit=True, ranks=ranks))

    assert report.outcome in ("refused", "identical"), report
    if "latents" not in model and Version(lab.release) >= Version("0.32") and ranks == (1, 2):
        report.must_be("identical")
    elif model != "latents and their heads":
        report.must_be("refused", "layers of several shapes")


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("ranks", "heads"), [((1, 2), 1), ((2, 1), 1), ((2, 4), 2), ((4, 2), 2)])
def test_a_draft_model_that_each_rank_has_whole(
    lab: Lab, ranks: tuple[int, int], heads: int, layout: str
) -> None:
    """Beside latents, in blocks alike: the release reads it, but 0.33 no P of more ranks."""
    model = replace(MODELS["latents"], draft_shape=(heads, 16), layout=layout, block_tokens=32)
    case = Case(f"draft on {ranks}", *(replace(model, tp_size=size) for size in ranks), 150)

    stock, patched = lab.run(case), lab.on_d(case)

    is_read = ranks[0] < ranks[1] or Version(lab.release) < Version("0.33")
    stock.must_be("identical" if is_read else "refused")
    assert patched.outcome == stock.outcome
    assert patched.descriptors == stock.descriptors


@pytest.mark.parametrize("ranks", [(1, 2), (4, 8), (2, 2)])
def test_a_draft_models_single_head_in_the_other_order(lab: Lab, ranks: tuple[int, int]) -> None:
    """Beside latents: vLLM compares no layouts, and one head has the same bytes in both."""
    model = replace(MODELS["latents"], draft_shape=(1, 16), block_tokens=32)
    sides = (
        replace(model, tp_size=size, layout=layout)
        for size, layout in zip(ranks, ("HND", "NHD"), strict=True)
    )
    case = Case(f"one head on {ranks}", *sides, 150)

    lab.run(case).must_be("identical")
    lab.on_d(case).must_be("identical")


@pytest.mark.parametrize("hit", [0, 64], ids=["no hit", "a hit"])
@pytest.mark.parametrize(
    ("ranks", "heads"), [((1, 2), 1), ((2, 4), 2), ((2, 1), 1), ((4, 2), 2), ((8, 4), 2)]
)
@pytest.mark.parametrize("p_layout", ["HND", "NHD"])
@pytest.mark.on(since="0.32")
def test_smaller_blocks_of_a_draft_model_that_each_rank_has_whole(
    lab: Lab, ranks: tuple[int, int], heads: int, hit: int, p_layout: str
) -> None:
    """Beside latents: the release joins them, but 0.33 none of more ranks."""
    model = replace(MODELS["latents"], draft_shape=(heads, 16))
    prefill = replace(model, tp_size=ranks[0], block_tokens=16, layout=p_layout)
    decode = replace(model, tp_size=ranks[1], block_tokens=64)
    case = Case(f"draft on {ranks}", prefill, decode, 150, hit)

    stock, patched = lab.run(case), lab.on_d(case)

    if ranks[0] > ranks[1] and Version(lab.release) >= Version("0.33"):
        stock.must_be("refused")
        patched.must_be("refused")
    else:
        stock.must_be("corrupt" if hit else "identical")
        patched.must_be("identical")


@pytest.mark.parametrize("hit", [0, 64], ids=["no hit", "a hit"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 4), (2, 8), (4, 8)])
@pytest.mark.on(since="0.33")
def test_smaller_blocks_of_a_draft_model_whose_heads_ranks_share_out(
    lab: Lab, ranks: tuple[int, int], hit: int
) -> None:
    """Beside latents, of fewer ranks, where a rank of D has one head of the draft model."""
    model = replace(MODELS["latents"], kv_heads=16, draft_shape=(ranks[1], 16))
    prefill = replace(model, tp_size=ranks[0], block_tokens=32)
    decode = replace(model, tp_size=ranks[1], block_tokens=64)
    case = Case(f"draft on {ranks}", prefill, decode, 150, hit)

    lab.run(case).must_be("corrupt" if hit else "identical")
    lab.on_d(case).must_be("identical")


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("shape", [(4, 64), (8, 32)])
@pytest.mark.parametrize("shared", [0, 1], ids=["read", "unread"])
@pytest.mark.on(since="0.30")
def test_pages_in_places_of_their_own(
    lab: Lab, shape: tuple[int, int], ranks: tuple[int, int], shared: int
) -> None:
    """Beside windows in BLHNC, a smaller page than the model's, which no other one overlays."""
    model = replace(
        MODELS["heads"],
        layers=5,
        head_dim=64,
        draft_shape=shape,
        window_tokens=(0, 40),
        layout="BLHNC",
        block_tokens=64,
        sharing_layers=shared,
    )
    case = Case(f"{shape} on {ranks}", *(replace(model, tp_size=size) for size in ranks), 150)

    lab.run(case).must_be("identical")
    lab.on_d(case).must_be("identical")


@pytest.mark.parametrize("hit", [0, 64], ids=["no hit", "a hit"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 4)])
@pytest.mark.on(since="0.32")
def test_smaller_pages_in_places_of_their_own(lab: Lab, ranks: tuple[int, int], hit: int) -> None:
    """Of fewer ranks: the release joins them."""
    model = replace(
        MODELS["heads"],
        layers=5,
        head_dim=64,
        draft_shape=(4, 64),
        window_tokens=(0, 40),
        layout="BLHNC",
    )
    prefill = replace(model, tp_size=ranks[0], block_tokens=32)
    decode = replace(model, tp_size=ranks[1], block_tokens=64)
    case = Case(f"windows on {ranks}", prefill, decode, 200, hit)

    lab.run(case).must_be("corrupt" if hit else "identical")
    lab.on_d(case).must_be("identical")


@pytest.mark.parametrize(
    ("p_layout", "d_layout"), [("NHD", "HND"), ("HND", "BLHNC"), ("BLHNC", "HND")]
)
@_NAMED
def test_other_layouts(lab: Lab, p_layout: str, d_layout: str) -> None:
    case = _case("heads", (16, 64), hit=True)
    prefill, decode = (
        replace(side, layout=layout)
        for side, layout in ((case.prefill, p_layout), (case.decode, d_layout))
    )

    lab.on_d(replace(case, prefill=prefill, decode=decode)).must_be("identical")


def test_drafted_tokens(lab: Lab, model: str) -> None:
    """Both sides have blocks behind the prompt's (<= 0.24 they name them)."""
    case = _case(model, (16, 64), hit=True)
    prefill, decode = (replace(s, lookahead_tokens=60) for s in (case.prefill, case.decode))

    lab.on_d(replace(case, prefill=prefill, decode=decode)).must_be("identical")


def test_a_like_pair_stays_as_stock_has_it(lab: Lab, model: str) -> None:
    case = _case(model, (32, 32), hit=True, ranks=(2, 2))

    stock, patched = lab.run(case), lab.on_d(case)

    stock.must_be("identical")
    assert replace(patched, seconds=0.0) == replace(stock, seconds=0.0)


def test_stock_reads_no_prefix_hit(lab: Lab, model: str) -> None:
    """0.24 ends some of these loads."""
    assert lab.run(_case(model, (16, 64), hit=True)).outcome in ("corrupt", "refused")


@_NAMED
def test_what_stock_reads_of_smaller_blocks(lab: Lab) -> None:
    """From 0.32 on all that are of heads alone; beside latents none of as many ranks."""
    reads = Version(lab.release) >= Version("0.32")

    lab.run(_case("heads", (16, 64), hit=False)).must_be("identical" if reads else "corrupt")
    lab.run(_case("latents", (16, 64), hit=False)).must_be("corrupt")
