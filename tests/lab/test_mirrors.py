"""vLLM's own host buffer, which mirrors the whole cache of a device in host memory.

<= 0.25 the mirror has the layout of its tensors' shapes, NHD, and states the device's, HND. Two of
one kind exchange whole blocks, and all else is read wrongly by stock, without a word.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS

from .case import MIRRORED, Case, EngineSpec
from .host import Lab


def _mirrors(release: str) -> bool:
    return FACTS[release].has_host_buffer_layout


pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(has=_mirrors)]

TOKENS = 150
SPEC = EngineSpec(
    device=MIRRORED,
    own_scheduler=True,
    block_tokens=16,
    planned_blocks=32,
    layers=2,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
)
WIDE, RANKS = replace(SPEC, block_tokens=64), replace(SPEC, tp_size=2)
NHD = replace(SPEC, layout="NHD")
MLA, FLASHINFER = replace(SPEC, family="mla", head_dim=64), replace(SPEC, family="flashinfer")
#: kvpatch's own buffer, whose bytes are what it states.
POOL = replace(SPEC, patched=True, settings=(("KVPATCH_HOST_BUFFER", "always"),))


def _case(pair: tuple[EngineSpec, EngineSpec]) -> Case:
    return Case("mirror", *pair, prompt_tokens=TOKENS, n_requests=2)


@pytest.mark.parametrize("spec", [SPEC, NHD], ids=["HND", "NHD"])
def test_like_pair_is_the_releases(lab: Lab, spec: EngineSpec) -> None:
    for pair in [(spec, spec.on()), (spec.on(), spec), (spec.on(), spec.on())]:
        lab.run(_case(pair)).must_be("identical")


UNLIKE = {
    "16 to 64": (SPEC, WIDE),
    "64 to 16": (WIDE, SPEC),
    "1 to 2 ranks": (SPEC, RANKS),
    "2 to 1 ranks": (RANKS, SPEC),
    "NHD, 16 to 64": (NHD, replace(WIDE, layout="NHD")),
    "NHD, 64 to 16": (replace(WIDE, layout="NHD"), NHD),
    "NHD, 1 to 2 ranks": (NHD, replace(RANKS, layout="NHD")),
    "NHD, 2 to 1 ranks": (replace(RANKS, layout="NHD"), NHD),
    "from kvpatch's": (POOL, SPEC),
    "to kvpatch's": (SPEC, POOL),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_pair_is_right_or_refused(lab: Lab, name: str) -> None:
    pair = UNLIKE[name]
    if POOL in pair and not FACTS[lab.release].encodes_metadata:
        pytest.skip("known to be wrong (docs/reference/limits.md): P cannot say what it has")
    stock = lab.run(_case(pair)) if POOL not in pair else None

    report = lab.run(_case((pair[0], pair[1].on())))

    if stock is not None and stock.outcome == "identical" and "NHD" not in name:
        report.must_be("identical")
    else:
        assert report.outcome in ("identical", "refused"), (stock, report)
    if report.outcome == "refused" and stock is not None and stock.outcome == "corrupt":
        assert "use one --block-size" in report.detail


def test_stock_reads_heads_for_tokens(lab: Lab) -> None:
    """The negative control: without an error, with as many blocks of as many bytes."""
    is_wrong = FACTS[lab.release].cache_shape != "packed"

    lab.run(_case(UNLIKE["1 to 2 ranks"])).must_be("corrupt" if is_wrong else "identical")


@pytest.mark.on(states_block_size=True)
def test_with_kvpatchs_buffer_on_both_sides_any_blocks_are_read(lab: Lab) -> None:
    for pair in [(16, 64), (64, 16)]:
        p, d = (replace(POOL, block_tokens=tokens) for tokens in pair)
        lab.run(_case((p, d))).must_be("identical")


@pytest.mark.parametrize("spec", [MLA, FLASHINFER], ids=["latents", "blocks first"])
def test_copies_of_another_dimension_are_refused(lab: Lab, spec: EngineSpec) -> None:
    """<= 0.22 the platform's copies take the second dimension for that of blocks."""
    report = lab.run(_case((spec.on(), spec.on())))

    if Version(lab.release) < Version("0.23"):
        report.must_be("refused", "set KVPATCH_HOST_BUFFER=always")
        spec = replace(spec, settings=POOL.settings)
        report = lab.run(_case((spec.on(), spec.on())))
    report.must_be("identical")


@pytest.mark.on(has_cache_groups=True)
@pytest.mark.parametrize("layout", ["HND", "BLHNC"])
def test_several_cache_groups_are_right_or_refused(lab: Lab, layout: str) -> None:
    """From 0.30 on D's mirrors of all layers are copied over the memory that groups share."""
    if layout == "BLHNC" and not FACTS[lab.release].names_layouts:
        pytest.skip("no such layout")
    spec = replace(SPEC, layers=4, planned_blocks=200, window_tokens=(0, 64), layout=layout)
    is_wrong = "region_group_ids" in FACTS[lab.release].agent_metadata
    lab.run(_case((spec, spec))).must_be("corrupt" if is_wrong else "identical")

    pairs = [(spec, spec.on()), (spec.on(), spec.on())]
    for report in [lab.run(_case(pair)) for pair in pairs]:
        if is_wrong:
            report.must_be("refused", "KVPATCH_HOST_BUFFER=always on both")
        else:
            report.must_be("identical")
    pool = replace(spec, patched=True, settings=POOL.settings)
    lab.run(_case((pool, pool))).must_be("identical")
