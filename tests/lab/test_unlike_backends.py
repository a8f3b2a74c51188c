"""P and D of one release with two attention backends, whose blocks hold the same rows elsewhere.

Keys by row, and by column (a CPU's). P is stock, the hash says which backend it has, and D with
kvpatch accepts that.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import EngineSpec, Family, Sabotage
from .host import Lab
from .selection import in_turns
from .test_named_factors import BACKEND, SPEC, assert_identical, assert_refused, pair

pytestmark = [pytest.mark.lab, pytest.mark.on(names_layouts=True)]

NAMES: dict[Family, str] = {
    "flash": "FLASH_ATTN",
    "flashinfer": "FLASHINFER",
    "triton": "TRITON_ATTN",
    "cpu": "CPU_ATTN",
}
_SPOILT = (
    ("cpu", "flash", "shift_block"),
    ("flash", "cpu", "skip_layer"),
    ("flashinfer", "flash", "flip_byte"),
)
PAIRS = [(p, d) for p in NAMES for d in NAMES if p != d]


def _spec(family: Family, **changes: object) -> EngineSpec:
    return replace(SPEC, family=family, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("backends", "tokens"), in_turns(PAIRS, [(32, 32), (64, 32), (32, 64)]))
def test_unlike_backends_are_read(
    lab: Lab, backends: tuple[Family, Family], tokens: tuple[int, int]
) -> None:
    sides = (_spec(family, block_tokens=n) for family, n in zip(backends, tokens, strict=True))
    case = pair(*sides, BACKEND)

    assert_identical(lab.run(case))


@pytest.mark.parametrize(("p_layout", "d_layout"), [("NHD", "NHD"), ("HND", "NHD")])
@pytest.mark.parametrize("p", ["cpu", "flashinfer"])
def test_in_other_layouts(lab: Lab, p: Family, p_layout: str, d_layout: str) -> None:
    if p == "cpu":  # which has one layout, whatever it is called
        p_layout = "HND"

    report = lab.run(pair(_spec(p, layout=p_layout), _spec("flash", layout=d_layout), BACKEND))

    assert_identical(report)


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("p", "d"), [("cpu", "flash"), ("flash", "cpu"), ("flashinfer", "flash")])
def test_with_unlike_ranks(lab: Lab, p: Family, d: Family, p_ranks: int, d_ranks: int) -> None:
    report = lab.run(pair(_spec(p, tp_size=p_ranks), _spec(d, tp_size=d_ranks), BACKEND))

    assert_identical(report)


def test_a_cpus_own_keys_of_two_bytes_are_known_and_its_peers_are_not(lab: Lab) -> None:
    """With AMX bfloat16 is in tiles, and a handshake says neither the one nor the other."""
    rows, columns = (_spec(family, dtype="bfloat16") for family in ("flash", "cpu"))

    assert_identical(lab.run(pair(rows, columns, BACKEND)))
    report = lab.run(pair(columns, rows, BACKEND))
    assert_refused(report, "the handshake does not say which P is", "--dtype float32")


def test_other_keys_of_two_bytes_are_tiled_by_no_processor(lab: Lab) -> None:
    rows, columns = (_spec(family, dtype="float16") for family in ("flash", "cpu"))

    assert_identical(lab.run(pair(rows, columns, BACKEND)))
    assert_identical(lab.run(pair(columns, rows, BACKEND)))


# -- what must be noticed ------------------------------------------------------------------


def test_rows_under_a_backends_name_whose_keys_lie_by_column_are_noticed(lab: Lab) -> None:
    """P has FlashAttention's tensors, and says that they are a CPU's: as many bytes, elsewhere."""
    lab.run(pair(accept=BACKEND, backend="CPU_ATTN")).must_be("corrupt")


@pytest.mark.parametrize(("p", "d", "sabotage"), _SPOILT)
def test_a_spoilt_cache_is_noticed(lab: Lab, p: Family, d: Family, sabotage: Sabotage) -> None:
    lab.run(pair(_spec(p), _spec(d), BACKEND), sabotage=sabotage).must_be("corrupt")


def test_without_the_factor_nothing_is_read(lab: Lab) -> None:
    report = lab.run(pair(_spec("cpu"), _spec("flash")))

    assert_refused(report, "P runs CPU_ATTN; this engine runs FLASH_ATTN")
