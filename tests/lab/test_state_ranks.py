"""Hybrid models between unlike numbers of ranks: each rank has its own share of a state.

A convolution's channels are several parts (x, B and C of Mamba2; q, k and v of gated delta nets and
of Kimi's delta attention), of each of which a rank has its share; of one group for all heads every
rank has all. What D holds is compared with what the whole model's states are on its ranks
(states.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS

from .case import Case, EngineSpec, Report
from .host import Lab
from .selection import some_of
from .states import MODELS

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.19")]

_PROMPT_TOKENS = 300
#: The first release whose connector takes states of a kind; of Kimi's there were four before.
_SINCE = {"gated delta net": "0.22", "kimi delta attention": "0.23", "mamba1": "0.25"}


def _spec(ranks: int, kind: str, block_tokens: int = 32, kv_heads: int = 4) -> EngineSpec:
    return EngineSpec(
        layout="HND",
        block_tokens=block_tokens,
        planned_blocks=48,
        layers=4,
        kv_heads=kv_heads,
        head_dim=32,
        tp_size=ranks,
        has_state=True,
        state_kind=kind,
    )


def _case(lab: Lab, ranks: tuple[int, int], kind: str, sizes: tuple[int, int] = (32, 32)) -> Case:
    if Version(lab.release) < Version(_SINCE.get(kind, "0.18")):
        pytest.skip("this release's connector takes no states of this kind")
    (p, d), (p_tokens, d_tokens) = ranks, sizes
    name = f"{kind}, TP{p} {p_tokens} to TP{d} {d_tokens}"
    return Case(name, _spec(p, kind, p_tokens), _spec(d, kind, d_tokens), _PROMPT_TOKENS)


def _ours(case: Case) -> Case:
    return case.patched(prefill=False)


def _expect_identical(lab: Lab, case: Case) -> Report:
    report = lab.run(case)
    if not FACTS[lab.release].has_channels_first:
        report.must_be("refused", "recurrent state is split over ranks")
        return report
    report.must_be("identical")
    assert report.moved_tokens >= _PROMPT_TOKENS - 1
    return report


@pytest.mark.parametrize("device", ["cuda", ""])
def test_steps_that_are_begun_ahead_are_refused(lab: Lab, device: str) -> None:
    """<= 0.25, on a device that computes beside its host: a CPU does one step after the other."""
    spec = replace(_spec(1, "mamba2"), device=device, schedules_ahead=True, patched=True)

    report = lab.run(Case("ahead", spec, spec, _PROMPT_TOKENS))

    if device and not FACTS[lab.release].spares_loaded_blocks:
        report.must_be("refused", "--no-async-scheduling")
        report = lab.run(Case("not ahead", *[replace(spec, schedules_ahead=False)] * 2, 300))
    report.must_be("identical")


_ALIKE = [
    *itertools.product([(1, 2), (2, 1)], MODELS),
    *itertools.product([(2, 4), (4, 2)], ["mamba2", "mamba2, one group"]),
    *itertools.product([(1, 4), (4, 1)], ["mamba2, one group"]),
]
_UNLIKE = [
    *some_of([(1, 2), (2, 1)], [(128, 64), (64, 128)], MODELS),
    *itertools.product([(1, 2), (2, 1), (2, 4), (4, 2)], [(96, 64)], ["mamba2, one group"]),
]


@pytest.mark.parametrize(("ranks", "kind"), _ALIKE)
def test_blocks_alike(lab: Lab, ranks: tuple[int, int], kind: str) -> None:
    """Stock takes one group for shared out (vLLM #55208), and has no such ranks before 0.20."""
    case = _case(lab, ranks, kind)
    ours = _expect_identical(lab, _ours(case))
    if max(ranks) > 2:
        return

    stock = lab.run(case.stock())

    if not FACTS[lab.release].has_channels_first:
        assert stock.outcome != "identical", stock
        return
    stock.must_be("corrupt" if MODELS[kind].groups == 1 else "identical")
    if stock.outcome == "identical":  # what is its own stays as it is
        assert replace(ours, seconds=0.0) == replace(stock, seconds=0.0)


@pytest.mark.parametrize(("ranks", "sizes", "kind"), _UNLIKE)
def test_unlike_blocks(lab: Lab, ranks: tuple[int, int], sizes: tuple[int, int], kind: str) -> None:
    _expect_identical(lab, _ours(_case(lab, ranks, kind, sizes)))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_shared_heads(lab: Lab, ranks: tuple[int, int]) -> None:
    """Attention's head is on both ranks, and the state's are not."""
    case = _case(lab, ranks, "mamba2", (64, 32))
    p, d = (replace(side, kv_heads=1) for side in (case.prefill, case.decode))

    _expect_identical(lab, _ours(replace(case, prefill=p, decode=d)))


@pytest.mark.on(since="0.20")  # else: has no such ranks
@pytest.mark.parametrize(("ranks", "heads"), [((2, 1), 1), ((4, 2), 2), ((4, 1), 2)])
def test_shared_heads_of_blocks_alike(lab: Lab, ranks: tuple[int, int], heads: int) -> None:
    """Stock refuses P's ranks beyond the heads, but not of a model with states: it reads them."""
    case = _case(lab, ranks, "mamba2")
    p, d = (replace(side, kv_heads=heads) for side in (case.prefill, case.decode))
    case = replace(case, prefill=p, decode=d)

    ours, stock = _expect_identical(lab, _ours(case)), lab.run(case.stock())

    assert replace(ours, seconds=0.0) == replace(stock, seconds=0.0)


@pytest.mark.parametrize("sizes", [(64, 64), (128, 64), (64, 128)])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_latents_beside_states(lab: Lab, ranks: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Kimi Linear's: each rank has all of a latent, and its share of a state.

    <= 0.26 stock reads one rank of P's alone, or ends.
    """
    case = _case(lab, ranks, "kimi delta attention", sizes)
    p, d = (
        replace(side, family="mla", layout="NHD", head_dim=64, dtype="float32")
        for side in (case.prefill, case.decode)
    )

    case = replace(case, prefill=p, decode=d)

    if ranks == (1, 2) or FACTS[lab.release].reads_states_by_latents:
        _expect_identical(lab, _ours(case))
        return
    lab.run(_ours(case)).must_be("refused", "this vLLM reads one of P's alone")
    assert lab.run(case.stock()).outcome in ("failed", "corrupt")


# the lab has states of other types in pages alone
@pytest.mark.on(has_channels_first=True, since="0.27")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_other_types_of_states(lab: Lab, side: str) -> None:
    """Alike but for ``--mamba-ssm-cache-dtype``: no hash tells it, no release compares sizes."""
    case = _case(lab, (1, 1), "mamba2")
    longer = replace(getattr(case, side), state_dtype="float32")
    case = replace(case, **{side: longer})

    lab.run(_ours(case)).must_be("refused", "its recurrent states take", "--mamba-ssm-cache-dtype")
    lab.run(case.stock()).must_be("corrupt")


@pytest.mark.parametrize("says", [True, False])
def test_types_of_states_of_as_many_bytes(lab: Lab, says: bool) -> None:
    """float16 beside bfloat16: P's bytes arrive, and are numbers of another kind to D.

    No handshake has a word for it (<= 0.33); P's kvpatch has.
    """
    case = _case(lab, (1, 1), "mamba2")
    p = replace(case.prefill, state_dtype="float16", patched=says)
    case = _ours(replace(case, prefill=p))
    case = replace(case, prefill=replace(case.prefill, patched=says))

    report = lab.run(case)

    if says and FACTS[lab.release].encodes_metadata:
        report.must_be(
            "refused",
            "hold states of bfloat16,bfloat16 here, and 'states of float16",
            "--mamba-ssm-cache-dtype",
        )
    else:
        report.must_be("identical")
    like = replace(case, decode=replace(case.decode, state_dtype="float16"))
    lab.run(like).must_be("identical")
    assert lab.run(case.stock()).outcome == "identical", "byte by byte"
