"""D reads from a P of another block size or layout, with kvpatch on D alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS

from .case import MIRRORED, Case, EngineSpec, Family
from .host import Lab
from .releases import has_tpus, is_full, moves_full_blocks_only, registers_cpu_caches, states_layout
from .selection import on_every_release
from .test_like_pairs import tokens_to_move
from .unlike import Dimensions, cases

pytestmark = pytest.mark.lab

SEED = 20
_CASES = {case.name: case for case in cases(Dimensions(), SEED, full=is_full())}


def _one_each_way() -> list[str]:
    """Larger blocks at P, and smaller ones."""
    by_size = {
        case.prefill.block_tokens > case.decode.block_tokens: name
        for name, case in _CASES.items()
        if case.prefill.block_tokens != case.decode.block_tokens
        and case.prompt_tokens >= 100
        and "all cached" not in name
        and case.prefill.family == "flash"
    }
    return list(by_size.values())


@pytest.mark.parametrize("name", on_every_release(_CASES, _one_each_way()))
def test_unlike_pair_is_identical(lab: Lab, name: str) -> None:
    case = _CASES[name]
    report = lab.on_d(case).must_be("identical")
    if moves_full_blocks_only(lab.release):  # where P's whole blocks end before ours, none
        assert report.moved_tokens <= tokens_to_move(case, lab.release)
        return
    assert report.moved_tokens == tokens_to_move(case, lab.release)


def _pair(
    family: Family = "flash",
    tokens: tuple[int, int] = (32, 64),
    layouts: tuple[str, str] = ("HND", "HND"),
    ranks: tuple[int, int] = (1, 1),
    head_dim: int = 32,
) -> Case:
    p, d = (
        EngineSpec(
            *(family, layout, size, 16),
            dtype="float32",
            tp_size=ranks_of_side,
            head_dim=head_dim,
        )
        for layout, size, ranks_of_side in zip(layouts, tokens, ranks, strict=True)
    )
    return Case(f"{family}, {layouts}, blocks {tokens}, ranks {ranks}", p, d, prompt_tokens=150)


def _pairs() -> Iterator[Any]:
    # A CPU's keys by column; 0.11.1 and 0.11.2 take its heads for the tokens of a block.
    for tokens in ((128, 32), (32, 128), (96, 64), (32, 32)):
        yield pytest.param(_pair("cpu", tokens), marks=pytest.mark.on(has=registers_cpu_caches))
    # A TPU's heads of keys and of values by turns, in one layout, and stated is the one that was
    # asked for. Unlike ranks releases refuse.
    for tokens in ((32, 64), (64, 32)):
        case = _pair("pallas", tokens, head_dim=128)
        yield pytest.param(case, marks=pytest.mark.on(has=has_tpus))
    # Heads are split by the plan, in NHD too, where stock refuses or goes wrong.
    for layout, ranks in itertools.product(("HND", "NHD"), ((1, 2), (2, 1))):
        yield _pair(layouts=(layout, layout), ranks=ranks)
    # Each rank has all of a latent, whichever heads of the model are its own.
    for tokens, ranks in itertools.product(((128, 64), (32, 64)), ((1, 2), (2, 2), (2, 4), (2, 1))):
        yield _pair("mla", tokens, ("NHD", "NHD"), ranks, head_dim=64)


@pytest.mark.parametrize("case", list(_pairs()), ids=lambda case: case.name)
def test_it_is_identical(lab: Lab, case: Case) -> None:
    lab.on_d(case).must_be("identical")


# -- what a handshake does not say ---------------------------------------------------------


def _other_items(p: int, p_dtype: str, d: int, d_dtype: str, prompt_tokens: int) -> Case:
    """P's items are of another size; all else is what D takes it for."""
    prefill, decode = (
        EngineSpec("flash", "HND", tokens, 40, kv_heads=2, head_dim=16, dtype=dtype)
        for tokens, dtype in ((p, p_dtype), (d, d_dtype))
    )
    name = f"P {p} of {p_dtype}, D {d} of {d_dtype}, {prompt_tokens} tokens"
    return Case(name, prefill, decode, prompt_tokens)


_OTHER_ITEMS = [
    (32, "fp8", 16, "bfloat16"),  # the same bytes
    (64, "fp8", 16, "bfloat16"),
    (16, "bfloat16", 64, "fp8"),
    (64, "float32", 32, "bfloat16"),
]


@pytest.mark.on(states_kernel_blocks=False)
@pytest.mark.parametrize("prompt_tokens", [1, 17, 300])
@pytest.mark.parametrize(("p", "p_dtype", "d", "d_dtype"), _OTHER_ITEMS)
def test_items_of_another_size_are_never_read(
    lab: Lab, p: int, p_dtype: str, d: int, d_dtype: str, prompt_tokens: int
) -> None:
    """<= 0.12 no hash of the model is compared, and <= 0.11.0 bytes are all there is."""
    case = _other_items(p, p_dtype, d, d_dtype, prompt_tokens)

    report = lab.on_d(case)

    assert report.outcome in ("refused", "failed") or not report.moved_tokens, report


@pytest.mark.on(states_hash=False)
@pytest.mark.parametrize(
    ("p", "d", "device"), [(16, 16, ""), (16, 32, ""), (32, 16, ""), (16, 16, MIRRORED)]
)
def test_items_of_another_type_are_refused(lab: Lab, p: int, d: int, device: str) -> None:
    """<= 0.12 no hash of the types is compared, and float16 has the size of bfloat16."""
    if device and not FACTS[lab.release].has_host_buffer_layout:
        pytest.skip("the lab mirrors no cache of this release's")
    case = _other_items(p, "float16", d, "bfloat16", 70)
    if device:
        of_d = replace(case.decode, device=device, own_scheduler=True, planned_blocks=32)
        of_p = replace(of_d, block_tokens=p, dtype="float16")
        case = replace(case, prefill=of_p, decode=of_d)

    lab.run(case.patched()).must_be("refused", "its keys and values are of 'float16'")


@pytest.mark.on(states_block_size=False)
def test_stock_reads_items_of_another_size(lab: Lab) -> None:
    """What must not happen, and that the lab sees it: 32 items of fp8 read as 16 of bf16."""
    report = lab.run(_other_items(32, "fp8", 16, "bfloat16", 16))

    # 0.10.0 names full blocks only, and stumbles over their number.
    report.must_be("corrupt" if states_layout(lab.release) else "failed")


def test_an_engine_that_ends_is_not_called_refused(lab: Lab) -> None:
    """<= 0.21 a step after a handshake that failed raises in stock; later ones fail the load."""
    report = lab.run(_pair(tokens=(128, 32)).stock())

    survives = Version(lab.release) >= Version("0.22")
    report.must_be("refused" if survives else "failed")


# -- blocks that FlashInfer cuts into kernel blocks of 64 ----------------------------------

_CUT = [(128, 128), (128, 64), (64, 128), (256, 128), (128, 16), (32, 128)]


def _cut_pair(p: int, d: int, prompt_tokens: int | None = None) -> Case:
    """Eight blocks of P's."""
    tokens = prompt_tokens or 8 * p - 20
    prefill, decode = (
        EngineSpec("flashinfer", "HND", size, tokens // size + 6, parts=max(1, size // 64))
        for size in (p, d)
    )
    return Case(f"flashinfer, cut, P {p}, D {d}", prefill, decode, tokens)


@pytest.mark.on(states_block_size=True)
@pytest.mark.parametrize(("p", "d"), _CUT)
def test_blocks_that_are_cut(lab: Lab, p: int, d: int) -> None:
    """Also where kernel blocks are alike and only how many a block has differs."""
    case = _cut_pair(p, d)

    lab.on_d(case).must_be("identical", moved=tokens_to_move(case, lab.release))


@pytest.mark.on(since="0.18")  # else: no such blocks
@pytest.mark.parametrize(("p", "d"), [(80, 48), (48, 80)])
def test_blocks_that_are_cut_into_16_tokens(lab: Lab, p: int, d: int) -> None:
    """Five kernel blocks to a block and three to the other's, which `<= 0.20` leaves open."""
    prefill, decode = (
        EngineSpec("flashinfer", "HND", size, 24, parts=size // 16, device="cuda")
        for size in (p, d)
    )
    case = Case(f"flashinfer, cut into 16, P {p}, D {d}", prefill, decode, prompt_tokens=300)

    lab.on_d(case).must_be("identical", moved=tokens_to_move(case, lab.release))


@pytest.mark.on(states_kernel_blocks=False, states_block_size=True)
def test_stock_takes_cut_blocks_for_its_own(lab: Lab) -> None:
    """What must not happen, and that the lab sees it."""
    lab.run(_cut_pair(128, 64, prompt_tokens=40)).must_be("corrupt")
