"""kvcached's caches through host buffers: pools that are registered once and never remapped.

kvcached's own view code over memory of which only the pages in use can be accessed: P saves
what it has just computed and D fills what it was handed, or their processes end. This is the
way where a network card would keep the pages of a registration.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from .caches import UNMAPPED
from .case import PEER_BLOCK_SIZE, Case, EngineSpec, Family
from .engine_api import Ask
from .host import Lab
from .kvcached_cells import LAYOUTS, spec
from .kvcached_standin import CARD
from .releases import moves_full_blocks_only
from .stage import Stage
from .test_host_buffer import ALWAYS
from .test_kvcached_groups import _spec as of_groups
from .test_kvcached_groups import _unlike as of_shapes
from .test_kvcached_state import _spec as of_states
from .test_like_pairs import tokens_to_move

pytestmark = [pytest.mark.lab, pytest.mark.some_generations]

_TOKENS = 150


def _engine(family: Family, layout: str, **more: object) -> EngineSpec:
    """An engine over kvcached's memory, or with a plain cache."""
    found = spec(family, LAYOUTS[layout]) if layout else EngineSpec(family, "NHD", layers=3)
    sizes = {"planned_blocks": 40, "tensor_blocks": 64 if layout else None}
    return replace(found, patched=True, **{**sizes, **more})  # type: ignore[arg-type]


def _buffered(engine: EngineSpec, *, as_p: bool = False) -> EngineSpec:
    """The same engine with a host buffer, in which P has the release's own scheduler."""
    own_scheduler = engine.own_scheduler or as_p
    return replace(engine, settings=(*engine.settings, *ALWAYS), own_scheduler=own_scheduler)


def _pair(family: Family, p: str, d: str, where: str, **more: object) -> Case:
    """Two engines, with host buffers on the sides that are named.

    Args:
        p, d: kvcached's layouts; empty for a plain cache.
    """
    prefill, decode = _engine(family, p, **more), _engine(family, d, **more)
    if "P" in where:
        prefill = _buffered(prefill, as_p=True)
    if "D" in where:
        decode = _buffered(decode)
    return Case(f"{family} {p} {d} {where}", prefill, decode, _TOKENS, n_requests=2)


#: (family, P's layout, D's layout, who has a host buffer)
PAIRS: list[tuple[Family, str, str, str]] = [
    *(("flash", "contiguous", "contiguous", where) for where in ("P D", "P", "D")),
    ("flash", "split-half", "split-half", "P D"),
    ("flash", "contiguous", "split-half", "P D"),
    *(("flash", each, "", "P") for each in LAYOUTS),
    *(("flash", "", each, "D") for each in LAYOUTS),
    ("mla", "contiguous", "", "P"),
    ("mla", "", "contiguous", "D"),
    ("flashinfer", "split-half", "", "P"),
    ("flashinfer", "", "split-half", "D"),
]


@pytest.mark.parametrize(("family", "p", "d", "where"), PAIRS)
def test_pairs_are_identical(lab: Lab, family: Family, p: str, d: str, where: str) -> None:
    wanted = _pair(family, p, d, where)

    lab.run(wanted).must_be("identical", moved=tokens_to_move(wanted, lab.release))


@pytest.mark.parametrize(
    ("layout", "p", "d"), [("contiguous", 16, 64), ("contiguous", 64, 16), ("split-half", 64, 16)]
)
def test_unlike_blocks_and_layouts(lab: Lab, layout: str, p: int, d: int) -> None:
    """Packed tensors alone can be HND; <= 0.25 kvcached's are NHD, whatever is asked."""
    found = _pair("flash", layout, layout, "P D")
    prefill = replace(found.prefill, block_tokens=p, layout="HND")
    wanted = replace(found, prefill=prefill, decode=replace(found.decode, block_tokens=d))

    report = lab.run(wanted)

    if moves_full_blocks_only(lab.release) and not report.moved_tokens:
        assert report.outcome != "corrupt", report  # 0.10.0 had nothing to send
        return
    report.must_be("identical")


def test_ranks_and_a_prefix_that_d_has(lab: Lab) -> None:
    wanted = _pair("flash", "contiguous", "contiguous", "P D", tp_size=2)

    lab.run(replace(wanted, prefix_hit_tokens=32)).must_be("identical")


@pytest.mark.on(states_block_size=True)
def test_blocks_that_are_cut(lab: Lab) -> None:
    cut = {"block_tokens": 128, "parts": 2, "planned_blocks": 20, "tensor_blocks": 30}
    wanted = _pair("flashinfer", "split-half", "split-half", "P D", **cut)

    lab.run(replace(wanted, prompt_tokens=350)).must_be("identical")


# --- what NIXL is handed ---------------------------------------------------------------


def _told(engine: EngineSpec) -> EngineSpec:
    """One that does not have to find out what blocks its peers have (<= 0.11.0)."""
    declared = (PEER_BLOCK_SIZE, str(engine.block_tokens))
    return replace(engine, settings=(*engine.settings, declared))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_kvcacheds_is_registered(stage: Stage, layout: str) -> None:
    engine = _engine("flash", layout)
    prefill, decode = (
        stage.start(_told(_buffered(replace(engine, planned_blocks=60), as_p=as_p)))
        for as_p in (True, False)
    )
    prompts = stage.prompts(2, _TOKENS)
    prefill.call("begin", prompts)
    answers = prefill.call("work")
    decode.ask(*(Ask(prompt, answers[prompt.name]) for prompt in prompts))
    decode.must_hold(*prompts)

    for actor in (prefill, decode):
        regions, of_kvcacheds = actor.call("exposed")
        assert regions > 0 and of_kvcacheds == 0, actor.name


def test_without_a_host_buffer_it_is(stage: Stage) -> None:
    """The negative control."""
    regions, of_kvcacheds = stage.start(_engine("flash", "contiguous")).call("exposed")

    assert regions == of_kvcacheds > 0


def test_beside_a_network_card(lab: Lab) -> None:
    """A card that is not there, and memory that is said to be a GPU's."""
    found = _pair("flash", "contiguous", "contiguous", "P D")
    card = (CARD, "mlx5_0"), ("UCX_TLS", "all"), ("UCX_NET_DEVICES", "all")
    p, d = (replace(e, settings=(*e.settings, *card)) for e in (found.prefill, found.decode))
    plain = replace(_engine("flash", "contiguous"), settings=card)

    through = lab.run(replace(found, prefill=p, decode=d))
    refused = lab.run(replace(found, prefill=plain, decode=plain))

    through.must_be("identical")
    refused.must_be("refused", "mlx5_0:1 (InfiniBand)", "UCX_TLS=^ib", "KVPATCH_HOST_BUFFER=always")


# --- pages and variables ---------------------------------------------------------------


def test_a_page_that_is_not_mapped_under_d_is_refused(lab: Lab) -> None:
    found = _pair("flash", "contiguous", "contiguous", "P D")
    unmapped = replace(found.decode, settings=(*found.decode.settings, (UNMAPPED, "1")))

    lab.run(replace(found, decode=unmapped)).must_be(
        "refused", "is not mapped: found the page of zeros"
    )


# --- several groups --------------------------------------------------------------------


@pytest.mark.on(since="0.20")  # else: no cache groups, or P frees a block that D looks at (<= 0.19)
@pytest.mark.parametrize(("layout", "p_tokens"), [("contiguous", 64), ("split-half", 32)])
def test_windows_and_groups_of_unlike_shapes(lab: Lab, layout: str, p_tokens: int) -> None:
    windows, gemma = (
        [of_groups("three groups", tokens, layout) for tokens in (p_tokens, 32)],
        [of_shapes(lab, "windows of 64 tokens", tokens, layout) for tokens in (p_tokens, 32)],
    )
    for p, d in (windows, gemma):
        lab.run(Case("groups", _buffered(p, as_p=True), _buffered(d), 300, 64)).must_be("identical")


@pytest.mark.on(since="0.18")
def test_recurrent_state_is_refused(lab: Lab) -> None:
    engine = _buffered(of_states("contiguous"))

    lab.run(Case("state", engine, engine, 300)).must_be(
        "refused", "attention layers in blocks, which alone go through a host buffer"
    )
