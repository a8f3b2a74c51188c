"""Several cache groups: full attention beside sliding windows, over shared tensors.

P and D run the release's own scheduler, block manager and prefix cache. What a
window's layers must hold is what the release keeps of it, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS

from .case import Case, EngineSpec, Report
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


_LIKE = _cases(LIKE)
#: For drafted tokens P has a block more than the prompt fills where they do not fit.
_WITH_A_BLOCK_MORE = (96, 158, 159, 256)
#: Two tokens more, and a window would begin with a block of P.
_AT_THE_EDGE = 158


def _speculating(sizes: tuple[int, int], prompt: int) -> Case:
    """P reserves slots for four drafted tokens, and computes the prompt in chunks."""
    case = _case("two groups", sizes, prompt)
    p = replace(case.prefill, lookahead_tokens=4, step_tokens=48)
    return replace(case, name=f"{case.name}, P speculates", prefill=p)


def _identical() -> Iterator[tuple[Case, str]]:
    """Cases, and the release before which P may have let go of a block that D needs."""
    yield from ((case, "") for case in _cases(BLOCK_TOKENS).values())
    case = _case("three groups", (64, 64), 300, "one block")
    for p_layout, d_layout in (("HND", "NHD"), ("NHD", "HND")):
        p = replace(case.prefill, layout=p_layout)
        d = replace(case.decode, layout=d_layout)
        yield replace(case, name=f"{p_layout} to {d_layout}", prefill=p, decode=d), ""
    for sizes in BLOCK_TOKENS.values():
        # Blocks that slide out of one request's window become another's.
        case = _case("three groups", sizes, 159)
        p = replace(case.prefill, step_tokens=80)
        yield replace(case, name=f"{case.name}, in chunks", prefill=p, n_requests=3), ""
        # <= 0.24 P sends the block of its drafts too, which may push one out in front.
        yield from ((_speculating(sizes, prompt), "0.25") for prompt in _WITH_A_BLOCK_MORE)
        # <= 0.19 P counts its answer's token too, and frees a block that D still looks at.
        case = _case("two groups", sizes, _AT_THE_EDGE)
        yield replace(case, name=f"{case.name}, at the edge"), "0.20"


def _expect_identical(case: Case, report: Report) -> None:
    tokens = case.n_requests * (case.prompt_tokens - case.prefix_hit_tokens)
    report.must_be("identical", moved=tokens)


@pytest.mark.parametrize(
    ("case", "since"), list(_identical()), ids=lambda value: getattr(value, "name", value)
)
def test_it_is_identical(lab: Lab, case: Case, since: str) -> None:
    report = lab.on_d(case)

    if since and report.outcome == "refused":
        assert Version(lab.release) < Version(since), report
        assert "let go of a block" in report.detail
        return
    _expect_identical(case, report)


@pytest.mark.parametrize("name", _LIKE)
def test_like_pair_stays_as_stock_has_it(lab: Lab, name: str) -> None:
    case = _LIKE[name]

    stock = lab.run(case)
    patched = lab.on_d(case)

    _expect_identical(case, stock)
    assert replace(patched, seconds=0.0) == replace(stock, seconds=0.0)


# --- a prefill engine that sends more or fewer blocks than the prompt fills ---


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


@pytest.mark.parametrize(
    ("case", "since"),
    [(_speculating((32, 32), 159), "0.25"), (_case("two groups", (32, 32), _AT_THE_EDGE), "0.20")],
    ids=["speculating", "at the edge"],
)
def test_stock_reads_what_p_has_let_go_of(lab: Lab, case: Case, since: str) -> None:
    """The same without kvpatch and with like engines: a block off <= 0.24, a token <= 0.19."""
    expected = "corrupt" if Version(lab.release) < Version(since) else "identical"
    lab.run(case).must_be(expected)  # type: ignore[arg-type]


# --- sliding windows alone, whose lists are the ends of tables ---


def _window_alone(prompt: int, cut: int = 0, window: int = WINDOW) -> Case:
    """P's blocks of `cut` tokens are cut into D's of 16; 0 for a P like D."""
    common = {"family": "flashinfer", "device": "cuda", "window_tokens": (window,), "layers": 2}
    d = replace(engine_of("two groups", 16), **common)
    p = replace(engine_of("two groups", cut), **common, parts=cut // 16) if cut else d
    return Case(f"window of {window} alone, {cut or 16} to 16", p, d, prompt)


_MAY_BE_CUT = pytest.mark.on(states_kernel_blocks=False)


@pytest.mark.parametrize(
    ("window", "cut", "prompt"),
    [
        *((WINDOW, 0, prompt) for prompt in (10, 100, 300)),
        *(pytest.param(WINDOW, 48, prompt, marks=_MAY_BE_CUT) for prompt in (10, 40, 100, 300)),
        *(pytest.param(16, cut, 100, marks=_MAY_BE_CUT) for cut in (0, 48)),
    ],
)
def test_windows_alone(lab: Lab, window: int, cut: int, prompt: int) -> None:
    """Of peers like D, and of those that may have cut theirs."""
    lab.on_d(_window_alone(prompt, cut, window)).must_be("identical", moved=prompt)


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
    case = _window_alone(prompt, cut=48)
    drafting = {"lookahead_tokens": 40}
    case = replace(
        case, prefill=replace(case.prefill, **drafting), decode=replace(case.decode, **drafting)
    )

    lab.on_d(case).must_be("corrupt" if facts.lists_drafted_blocks else "identical")


@_MAY_BE_CUT
def test_stock_takes_cut_windows_for_its_own(lab: Lab) -> None:
    """What must not happen, and that the lab sees it."""

    lab.run(_window_alone(10, cut=48)).must_be("corrupt")
