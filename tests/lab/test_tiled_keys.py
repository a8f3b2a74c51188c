"""A CPU's keys and values in tiles (AMX) beside tiles of other blocks, columns and rows.

No machine of the lab has AMX: the release is told that its processor has, chooses its kernels by
that, and the lab packs what they would (``tests/lab/kinds.py``). All else is the release's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpatch.core.releases import FACTS

from .case import PEER_KEYS, Case, EngineSpec
from .host import Lab
from .releases import misreads_cpu_blocks, registers_cpu_caches
from .selection import in_turns, some_of
from .test_named_factors import BACKEND, assert_refused
from .test_named_factors import pair as disguised

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(has=registers_cpu_caches),
]

TOKENS = 150
TILES, COLUMNS = "tiles", "columns"


def cpu(tokens: int, *, amx: bool, **changes: object) -> EngineSpec:
    spec = EngineSpec("cpu", block_tokens=tokens, planned_blocks=16, dtype="bfloat16", amx=amx)
    return replace(spec, **changes)  # type: ignore[arg-type]


def declaring(case: Case, keys: str | None) -> Case:
    settings = () if keys is None else ((PEER_KEYS, keys),)
    return replace(case, decode=replace(case.decode, settings=(*case.decode.settings, *settings)))


def pair(
    lab: Lab, p: EngineSpec, d: EngineSpec, keys: str | None, *, p_has_kvpatch: bool = False
) -> Case:
    case = declaring(Case("tiles", p, d, prompt_tokens=TOKENS), keys)
    return case.patched(prefill=p_has_kvpatch)


def _name(value: object) -> str:
    """Of a parameter, in a test's name."""
    if not isinstance(value, EngineSpec):
        return str(value)
    keys = TILES if value.amx else COLUMNS
    return "-".join(
        map(str, (value.block_tokens, keys, value.tp_size, *dict(value.settings).values()))
    )


def _identical() -> Iterator[tuple[EngineSpec, EngineSpec, str | None, int]]:
    """P, D, what the operator declares of P's keys (else P's kvpatch says it), and a prefix hit."""
    pairs = in_turns([(128, 32), (32, 64), (96, 64)], ["auto", "staged", "direct"])
    for (p, d), transfer in [((128, 32), "direct"), *pairs]:
        how = (("KVPATCH_TRANSFER", transfer),)
        yield cpu(p, amx=True), cpu(d, amx=True, settings=how), TILES, 0
    # Tiles beside columns, in blocks of one size too, which stock takes for each other.
    sizes = [(64, 32), (32, 32), (32, 64)]
    for (p, d), p_amx, p_has_kvpatch in some_of(sizes, (False, True), (False, True)):
        keys = None if p_has_kvpatch else TILES if p_amx else COLUMNS
        yield cpu(p, amx=p_amx), cpu(d, amx=not p_amx), keys, 0
    for amx in (False, True):
        yield cpu(64, amx=amx), cpu(32, amx=amx), None, 0
    yield cpu(128, amx=True), cpu(32, amx=True), TILES, 96
    for p, d in ((1, 2), (2, 1)):
        yield cpu(64, amx=True, tp_size=p), cpu(32, amx=True, tp_size=d), TILES, 0


@pytest.mark.parametrize(("p", "d", "keys", "hit"), list(_identical()), ids=_name)
def test_it_is_identical(
    lab: Lab, p: EngineSpec, d: EngineSpec, keys: str | None, hit: int
) -> None:
    case = pair(lab, p, d, keys, p_has_kvpatch=keys is None)

    lab.run(replace(case, prefix_hit_tokens=hit)).must_be("identical")


@pytest.mark.every_release
def test_a_like_pair_is_stocks(lab: Lab) -> None:
    """With kvpatch on D, on both, and on none, but where vLLM itself ends by such a pair."""
    case = Case("like", cpu(32, amx=True), cpu(32, amx=True), prompt_tokens=TOKENS)
    for one in (case.patched(prefill=False), case.patched()):
        lab.run(one).must_be("identical")

    stock = lab.run(case.stock())

    if misreads_cpu_blocks(lab.release):
        stock.must_be("failed", "RuntimeError: shape")
    else:
        stock.must_be("identical")


@pytest.mark.parametrize("amx", [False, True])
def test_nobody_says_how_they_lie(lab: Lab, amx: bool) -> None:
    lab.run(pair(lab, cpu(64, amx=amx), cpu(32, amx=amx), None)).must_be(
        "refused", "KVPATCH_PEER_KEYS", moved=0
    )


@pytest.mark.parametrize("keys", [None, TILES])
@pytest.mark.parametrize("amx", [False, True])
def test_float16_is_in_no_tiles(lab: Lab, amx: bool, keys: str | None) -> None:
    """Nothing is open there, whatever is declared."""
    p, d = (cpu(tokens, amx=amx, dtype="float16") for tokens in (64, 32))

    lab.run(pair(lab, p, d, keys)).must_be("identical")


# --- beside other backends, whose keys are rows -------------------------------------------


def _rows(tokens: int, **changes: object) -> EngineSpec:
    spec = EngineSpec("flash", block_tokens=tokens, planned_blocks=16, dtype="bfloat16")
    return replace(spec, **changes)  # type: ignore[arg-type]


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize(
    ("tokens", "amx", "p_has_kvpatch"),
    some_of([(32, 32), (64, 16), (32, 64)], (False, True), (False, True)),
)
def test_into_rows(lab: Lab, tokens: tuple[int, int], amx: bool, p_has_kvpatch: bool) -> None:
    p_tokens, d_tokens = tokens
    keys = None if p_has_kvpatch else TILES if amx else COLUMNS
    case = declaring(disguised(cpu(p_tokens, amx=amx), _rows(d_tokens), BACKEND), keys)
    if p_has_kvpatch:
        case = case.patched()

    lab.run(case).must_be("identical")


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize(("p_tokens", "d_tokens"), [(32, 32), (16, 32), (64, 32), (48, 64)])
def test_out_of_rows(lab: Lab, p_tokens: int, d_tokens: int) -> None:
    """Of rows nothing is open."""
    case = disguised(_rows(p_tokens), cpu(d_tokens, amx=True), BACKEND)

    lab.run(case).must_be("identical")


@pytest.mark.on(names_layouts=True)
def test_into_rows_when_nobody_says_how_they_lie(lab: Lab) -> None:
    report = lab.run(disguised(cpu(32, amx=True), _rows(32), BACKEND))

    assert_refused(report, "the handshake does not say which P is", "KVPATCH_PEER_KEYS")


# --- what must be noticed -----------------------------------------------------------------


@pytest.mark.parametrize("p_amx", [False, True])
@pytest.mark.parametrize("d_amx", [False, True])
def test_a_wrong_declaration_is_noticed(lab: Lab, p_amx: bool, d_amx: bool) -> None:
    """That is what is asked for so as not to be guessed: bytes in other places."""
    keys = COLUMNS if p_amx else TILES

    case = pair(lab, cpu(64, amx=p_amx), cpu(32, amx=d_amx), keys)

    report = lab.run(case).must_be("corrupt")
    assert report.wrong_elements > 0


@pytest.mark.on(names_layouts=True)
def test_a_wrong_declaration_beside_rows_is_noticed(lab: Lab) -> None:
    lab.run(declaring(disguised(cpu(64, amx=True), _rows(32), BACKEND), COLUMNS)).must_be("corrupt")


def test_a_wrong_declaration_is_refused_where_p_says_otherwise(lab: Lab) -> None:
    report = lab.run(
        pair(lab, cpu(64, amx=True), cpu(32, amx=True), COLUMNS, p_has_kvpatch=True)
    ).must_be("refused")
    assert "declares columns and P has keys in tiles" in report.detail


@pytest.mark.parametrize("amx", [False, True])
def test_stock_takes_unlike_processors_for_each_other(lab: Lab, amx: bool) -> None:
    """What is mended here; and that the lab's tiles are no columns."""
    case = Case("unlike", cpu(32, amx=amx), cpu(32, amx=not amx), prompt_tokens=TOKENS)

    report = lab.run(case.stock())

    # Where a worker takes heads for tokens (vllm_bugs.py) it ends over what it has read.
    misreads = FACTS[lab.release].topology_has_block_size
    report.must_be("failed" if misreads else "corrupt")
