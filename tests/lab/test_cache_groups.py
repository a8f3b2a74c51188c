"""Several cache groups: full attention beside sliding windows, over shared tensors.

P and D run the release's own scheduler, block manager and prefix cache. What a
window's layers must hold is what the release keeps of it, and no more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS

from .case import Case, EngineSpec, Report, Sabotage
from .host import Lab
from .release import HYBRID_MODEL_TOKENS
from .selection import some_of

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.18")]

WINDOW = 64
#: Layers by turns: full attention and a window, and full attention and two windows.
MODELS = {"two groups": ((0, WINDOW), 4), "three groups": ((0, WINDOW, WINDOW), 6)}
BLOCK_TOKENS = {"32 to 64": (32, 64), "64 to 32": (64, 32), "96 to 64": (96, 64)}
LIKE = {"32 to 32": (32, 32)}
#: Shorter than the window, about as long, and several times it.
PROMPTS = (1, 40, 64, 65, 159, 300)
HITS = ("none", "one block", "all but one")


def engine_of(model: str, block_tokens: int) -> EngineSpec:
    windows, layers = MODELS[model]
    # Room for the longest request in every group, as the release demands, and more.
    blocks = (len(windows) + 1) * (HYBRID_MODEL_TOKENS // block_tokens + 2)
    return EngineSpec(
        block_tokens=block_tokens,
        planned_blocks=blocks,
        layers=layers,
        window_tokens=windows,
        kv_heads=2,
        head_dim=16,
    )


def _case(model: str, sizes: tuple[int, int], prompt: int, hit: str = "none") -> Case:
    p, d = sizes
    full = (prompt - 1) // d  # one token at least is left to compute
    hits = {"none": 0, "one block": min(1, full), "all but one": max(0, full - 1)}
    return Case(
        f"{model}, {p} to {d}, {prompt} tokens, {hit} cached",
        engine_of(model, p),
        engine_of(model, d),
        prompt,
        hits[hit] * d,
    )


def _cases(all_sizes: dict[str, tuple[int, int]]) -> dict[str, Case]:
    """Every pair of values of any two dimensions at least once, or the whole product."""
    rows = some_of(MODELS, all_sizes.values(), PROMPTS, HITS)
    cases = (_case(model, sizes, prompt, hit) for model, sizes, prompt, hit in rows)
    # Without a whole block there is but one kind of hit.
    return {case.name: case for case in cases if case.prefix_hit_tokens or "none" in case.name}


_UNLIKE = _cases(BLOCK_TOKENS)
_LIKE = _cases(LIKE)


def _expect_identical(case: Case, report: Report) -> None:
    tokens = case.n_requests * (case.prompt_tokens - case.prefix_hit_tokens)
    report.must_be("identical", moved=tokens)


def _expect_identical_since(lab: Lab, case: Case, since: str) -> None:
    """Earlier releases' P may have let go of a block that D needs."""
    report = lab.on_d(case)
    if report.outcome == "refused":
        assert Version(lab.release) < Version(since), report
        assert "let go of a block" in report.detail
        return
    _expect_identical(case, report)


@pytest.mark.parametrize("name", _UNLIKE)
def test_unlike_pair_is_identical(lab: Lab, name: str) -> None:
    case = _UNLIKE[name]

    report = lab.on_d(case)

    _expect_identical(case, report)


@pytest.mark.parametrize("name", _LIKE)
def test_like_pair_stays_as_stock_has_it(lab: Lab, name: str) -> None:
    case = _LIKE[name]

    stock = lab.run(case)
    patched = lab.on_d(case)

    _expect_identical(case, stock)
    assert replace(patched, seconds=0.0) == replace(stock, seconds=0.0)


@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("NHD", "HND")])
def test_unlike_layouts(lab: Lab, layouts: tuple[str, str]) -> None:
    case = _case("three groups", (64, 64), 300, "one block")
    p, d = (
        replace(engine, layout=layout)
        for engine, layout in zip((case.prefill, case.decode), layouts, strict=True)
    )

    _expect_identical(case, lab.on_d(replace(case, prefill=p, decode=d)))


@pytest.mark.parametrize("sizes", BLOCK_TOKENS)
def test_several_requests_in_chunks(lab: Lab, sizes: str) -> None:
    """Blocks that slide out of one request's window become another's."""
    case = _case("three groups", BLOCK_TOKENS[sizes], 159)
    chunked = replace(case, prefill=replace(case.prefill, step_tokens=80), n_requests=3)

    _expect_identical(chunked, lab.on_d(chunked))


@pytest.mark.parametrize(
    ("sabotage", "sizes", "model"),
    some_of(["shift_block", "skip_layer", "flip_byte"], [(32, 64), (32, 32)], MODELS),
    ids=str,
)
def test_a_spoilt_cache_is_noticed(
    lab: Lab, model: str, sizes: tuple[int, int], sabotage: Sabotage
) -> None:
    case = _case(model, sizes, 159, "one block")

    lab.on_d(case, sabotage=sabotage).must_be("corrupt")


# --- a prefill engine that sends more or fewer blocks than the prompt fills ---


def _speculating(sizes: tuple[int, int], prompt: int) -> Case:
    """P reserves slots for four drafted tokens, and computes the prompt in chunks."""
    case = _case("two groups", sizes, prompt)
    p = replace(case.prefill, lookahead_tokens=4, step_tokens=48)
    return replace(case, name=f"{case.name}, P speculates", prefill=p)


#: For drafted tokens P has a block more than the prompt fills where they do not fit.
_WITH_A_BLOCK_MORE = (96, 158, 159, 256)


@pytest.mark.parametrize("prompt", _WITH_A_BLOCK_MORE)
@pytest.mark.parametrize("sizes", BLOCK_TOKENS)
def test_a_speculating_prefill_engine_of(lab: Lab, sizes: str, prompt: int) -> None:
    """<= 0.24 P sends that block too, behind the prompt's; it may push one out in front."""
    _expect_identical_since(lab, _speculating(BLOCK_TOKENS[sizes], prompt), "0.25")


def test_a_speculating_prefill_engine_alone(lab: Lab) -> None:
    """The same pair without kvpatch: a like one, which stock reads a block off <= 0.24."""
    case = _speculating((32, 32), 159)

    report = lab.run(case)

    sends_drafts = Version(lab.release) < Version("0.25")
    assert report.outcome == ("corrupt" if sends_drafts else "identical"), report


@pytest.mark.parametrize("hit", ["none", "one block"])
@pytest.mark.parametrize("prompt", [160, 191])
def test_a_speculating_decode_engine_of(lab: Lab, prompt: int, hit: str) -> None:
    """In 0.23 and 0.24 a D with a draft model has blocks behind the prompt's, too.

    Its list of a window is then short of one block where the window begins in the
    last but one: no read can be right.
    """
    case = _case("two groups", (32, 64), prompt, hit)
    case = replace(case, decode=replace(case.decode, lookahead_tokens=40))

    report = lab.on_d(case)

    if prompt == 160 and Version(lab.release).release[:2] in ((0, 23), (0, 24)):
        assert report.outcome == "refused" and "draft model" in report.detail, report
        return
    _expect_identical(case, report)


#: Two tokens more, and a window would begin with a block of P.
_AT_THE_EDGE = 158


@pytest.mark.parametrize("sizes", BLOCK_TOKENS)
def test_a_block_at_the_edge_of_the_window(lab: Lab, sizes: str) -> None:
    """<= 0.19 P counts its answer's token too, and frees a block that D still looks at."""
    case = _case("two groups", BLOCK_TOKENS[sizes], _AT_THE_EDGE)

    _expect_identical_since(lab, case, "0.20")


def test_a_block_at_the_edge_of_the_window_alone(lab: Lab) -> None:
    """The same without kvpatch and with like engines: stock reads one token too few <= 0.19."""
    report = lab.run(_case("two groups", (32, 32), _AT_THE_EDGE))

    frees_too_much = Version(lab.release) < Version("0.20")
    assert report.outcome == ("corrupt" if frees_too_much else "identical"), report


# --- sliding windows alone, whose lists are the ends of tables ---


def _window_alone(block_tokens: int, prompt: int, cut: int = 0, window: int = WINDOW) -> Case:
    """P's blocks of `cut` tokens are cut into D's; 0 for a P like D."""
    common = {"family": "flashinfer", "device": "cuda", "window_tokens": (window,), "layers": 2}
    d = replace(engine_of("two groups", block_tokens), **common)
    p = replace(engine_of("two groups", cut), **common, parts=cut // block_tokens) if cut else d
    return Case(f"window of {window} alone, {cut or block_tokens} to {block_tokens}", p, d, prompt)


@pytest.mark.on(states_kernel_blocks=False)
@pytest.mark.parametrize(
    ("window", "cut", "prompt"),
    [*((WINDOW, 48, prompt) for prompt in (10, 40, 100, 300)), (16, 0, 100), (16, 48, 100)],
)
def test_windows_alone_that_a_peer_may_have_cut(
    lab: Lab, window: int, cut: int, prompt: int
) -> None:
    case = _window_alone(16, prompt, cut, window)

    lab.on_d(case).must_be("identical", moved=prompt)


@pytest.mark.parametrize("prompt", [10, 100, 300])
def test_windows_alone_of_peers_like_us(lab: Lab, prompt: int) -> None:
    case = _window_alone(16, prompt)

    lab.on_d(case).must_be("identical", moved=prompt)


@pytest.mark.parametrize("prompt", [100, 159, 300])
def test_windows_alone_of_engines_that_draft(lab: Lab, prompt: int) -> None:
    """From 0.25 on lists end with the prompt.

    In 0.23 and 0.24 nothing tells where they end: kvpatch refuses such a peer where the worker's
    configuration has a draft model, which the lab's has not.
    """
    facts = FACTS[lab.release]
    if not facts.has_cache_groups or (
        facts.lists_drafted_blocks and not facts.reserves_drafted_blocks
    ):
        pytest.skip("whether a block more is named depends on the prompt (<= 0.22)")
    case = _window_alone(16, prompt, cut=48)
    drafting = {"lookahead_tokens": 40}
    case = replace(
        case, prefill=replace(case.prefill, **drafting), decode=replace(case.decode, **drafting)
    )

    lab.on_d(case).must_be("corrupt" if facts.lists_drafted_blocks else "identical")


@pytest.mark.on(states_kernel_blocks=False)
def test_stock_takes_cut_windows_for_its_own(lab: Lab) -> None:
    """What must not happen, and that the lab sees it."""

    assert lab.run(_window_alone(16, 10, cut=48)).outcome == "corrupt"
