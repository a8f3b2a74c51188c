"""A P whose compatibility hash is another: D says how it differs, and accepts what it is told to.

P is stock, and disguised in what it hashes: another version of vLLM, another attention backend
(real ones, with their own tensors), another model. D is played with kvpatch, over real handshakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.peer.decision import ALIKE

from .case import Case, EngineSpec, Family, Report
from .disguise import settings
from .host import Lab
from .selection import in_turns

pytestmark = [pytest.mark.lab, pytest.mark.on(states_hash=True)]

SPEC = EngineSpec(dtype="float32", block_tokens=32)
TOKENS = 107
VERSION, BACKEND = "vllm_version", "attn_backend"
#: How a refusal begins that names nothing.
_NAMELESS = "compatibility hash mismatch, and no version of vLLM and no attention backend"


def another(release: str) -> str:
    """The nearest release that does alike what both sides must, or another build of this one."""
    found = [name for name in _others(release) if _does_alike(release, name)]
    place = list(FACTS).index
    nearest = sorted(found, key=lambda name: abs(place(name) - place(release)))
    return nearest[0] if nearest else f"{release}+cu129"


def another_kind(release: str) -> str:
    """The nearest that does not."""
    found = [name for name in _others(release) if not _does_alike(release, name)]
    if not found:
        pytest.skip("every release that hashes the same does the same")
    place = list(FACTS).index
    return min(found, key=lambda name: abs(place(name) - place(release)))


def _others(release: str) -> list[str]:
    """Those that a disguised engine of this one can be: they hash the same facts."""
    hashed = FACTS[release].hash_factors
    return [n for n, facts in FACTS.items() if facts.hash_factors == hashed and n != release]


def _does_alike(release: str, other: str) -> bool:
    own, theirs = FACTS[release], FACTS[other]
    forms = (facts.form_of("FLASH_ATTN") for facts in (own, theirs))
    return len(set(forms)) == 1 and all(getattr(own, f) == getattr(theirs, f) for f in ALIKE)


def are_alike(release: str, ours: str, theirs: str) -> bool:
    """Whether two backends of a release have blocks of one form, and it says how they are cut."""
    facts = FACTS[release]
    form = facts.form_of(ours)
    return facts.states_kernel_blocks and form is not None and form == facts.form_of(theirs)


def pair(p: EngineSpec = SPEC, d: EngineSpec = SPEC, accept: str = "", **disguise: str) -> Case:
    """A disguised P, and a D with kvpatch that accepts some factors."""
    prefill = replace(p, settings=(*p.settings, *settings(**disguise)))
    accepted = (("KVPATCH_ACCEPT", accept),) if accept else ()
    decode = replace(d, planned_blocks=24, settings=(*d.settings, *accepted))
    case = Case("disguised", prefill, decode, prompt_tokens=TOKENS)
    return case.patched(prefill=False)


def assert_refused(report: Report, *sentences: str) -> None:
    report.must_be("refused", *sentences, moved=0)


def assert_identical(report: Report) -> None:
    report.must_be("identical", moved=TOKENS)


# -- versions ----------------------------------------------------------------------------


@pytest.mark.every_release
def test_another_version_is_accepted(lab: Lab) -> None:
    assert_identical(lab.run(pair(accept=VERSION, version=another(lab.release))))


def test_another_build_of_our_release_is_accepted(lab: Lab) -> None:
    version = f"{lab.release}+cu129"
    assert_refused(lab.run(pair(version=version)), f"P runs vLLM {version}; this engine runs")
    assert_identical(lab.run(pair(accept=f"{VERSION},{BACKEND}", version=version)))


def test_unlike_blocks_of_an_accepted_version_are_read(lab: Lab) -> None:
    larger = replace(SPEC, block_tokens=64)
    report = lab.run(pair(larger, accept=VERSION, version=another(lab.release)))
    assert_identical(report)


def test_stock_refuses_another_version_without_a_word_of_it(lab: Lab) -> None:
    """What is mended here, and that the disguise works."""
    report = lab.run(pair(version=another(lab.release)).stock())
    assert report.outcome in ("refused", "failed"), report  # <= 0.21 D's engine ends
    assert "P runs vLLM" not in report.detail
    assert "NIXL compatibility hash mismatch" in report.detail or report.outcome == "failed"


def test_what_is_not_listed_is_not_waived(lab: Lab) -> None:
    version = another(lab.release)
    report = lab.run(pair(accept=BACKEND, version=version))
    assert_refused(report, f"P runs vLLM {version}", "KVPATCH_ACCEPT=attn_backend,vllm_version")


def test_a_version_that_does_things_otherwise_is_refused(lab: Lab) -> None:
    version = another_kind(lab.release)
    report = lab.run(pair(accept=VERSION, version=version))
    assert_refused(report, "cannot be read", version)


# -- attention backends ------------------------------------------------------------------


def test_another_backend_is_accepted_where_its_blocks_are_alike(lab: Lab) -> None:
    triton = replace(SPEC, family="triton")
    report = lab.run(pair(triton, accept=BACKEND))
    if are_alike(lab.release, "FLASH_ATTN", "TRITON_ATTN"):
        assert_identical(report)
    else:
        assert_refused(report, "cannot be read", "use one attention backend on both sides")


@pytest.mark.on(names_layouts=False)
def test_keys_by_column_are_not_taken_for_rows(lab: Lab) -> None:
    """Blocks of as many bytes, with other bytes in them: what leaving out the hash would read."""
    report = lab.run(pair(accept=BACKEND, backend="CPU_ATTN"))
    assert_refused(report, "blocks of CPU_ATTN", "use one attention backend on both sides")


def test_version_and_backend_are_named_together(lab: Lab) -> None:
    version = another(lab.release)
    triton = replace(SPEC, family="triton")
    named = (
        f"P runs vLLM {version} with TRITON_ATTN; this engine runs {lab.release} with FLASH_ATTN"
    )
    report = lab.run(pair(triton, version=version))
    assert_refused(report, named, "KVPATCH_ACCEPT=vllm_version,attn_backend")
    assert_refused(lab.run(pair(triton, accept=VERSION, version=version)), named)
    report = lab.run(pair(triton, accept=f"{VERSION},{BACKEND}", version=version))
    if are_alike(lab.release, "FLASH_ATTN", "TRITON_ATTN"):
        assert_identical(report)
    else:
        assert_refused(report, "cannot be read")


# -- what is never accepted ----------------------------------------------------------------


@pytest.mark.every_release
def test_another_model_is_never_accepted(lab: Lab) -> None:
    assert_refused(lab.run(pair(model="another/model")), _NAMELESS)
    report = lab.run(pair(accept=f"{VERSION},{BACKEND}", model="another/model"))
    assert_refused(report, _NAMELESS)


def test_another_data_type_is_never_accepted(lab: Lab) -> None:
    """Both have two bytes: nothing but the hash tells them apart."""
    p, d = (replace(SPEC, dtype=dtype) for dtype in ("float16", "bfloat16"))
    # The lab's models have their type in their names.
    model = settings(model="lab/model")
    report = lab.run(pair(p, replace(d, settings=model), f"{VERSION},{BACKEND}", model="lab/model"))
    assert_refused(report, _NAMELESS, "dtype 'torch.bfloat16'", "compare these with P's")
    assert "KVPATCH_ACCEPT" not in report.detail


def test_who_lies_about_its_geometry_is_still_checked_by_it(lab: Lab) -> None:
    """The hash is one that is accepted, and the blocks are another model's."""
    wide = replace(SPEC, head_dim=64)
    ours = replace(SPEC, settings=settings(model="lab/model"))
    lie = {"model": "lab/model", "head_size": "32", "version": another(lab.release)}
    report = lab.run(pair(wide, ours, VERSION, **lie))
    assert report.outcome in ("refused", "failed"), report
    assert "compatibility hash mismatch" not in report.detail


# -- two backends whose blocks hold the same rows elsewhere, a CPU's by column ----------------

_NAMES_LAYOUTS = pytest.mark.on(names_layouts=True)
_FAMILIES: tuple[Family, ...] = ("flash", "flashinfer", "triton", "cpu")
_PAIRS = [(p, d) for p in _FAMILIES for d in _FAMILIES if p != d]


def _of(family: Family, **changes: object) -> EngineSpec:
    return replace(SPEC, family=family, **changes)  # type: ignore[arg-type]


def _alike(p: Family, d: Family, **changes: object) -> tuple[EngineSpec, EngineSpec]:
    return _of(p, **changes), _of(d, **changes)


def _unlike_backends() -> Iterator[tuple[EngineSpec, EngineSpec]]:
    for (p, d), (p_tokens, d_tokens) in in_turns(_PAIRS, [(32, 32), (64, 32), (32, 64)]):
        yield _of(p, block_tokens=p_tokens), _of(d, block_tokens=d_tokens)
    yield _of("cpu"), _of("flash", layout="NHD")  # a CPU has one layout, whatever it is called
    for layout in ("NHD", "HND"):
        yield _of("flashinfer", layout=layout), _of("flash", layout="NHD")
    for p, d in _PAIRS:
        if (p, d) in (("cpu", "flash"), ("flash", "cpu"), ("flashinfer", "flash")):
            yield _of(p, tp_size=1), _of(d, tp_size=2)
            yield _of(p, tp_size=2), _of(d, tp_size=1)
    # With AMX a CPU's bfloat16 is in tiles, which its own D knows; no processor tiles float16.
    yield _alike("flash", "cpu", dtype="bfloat16")
    yield _alike("flash", "cpu", dtype="float16")
    yield _alike("cpu", "flash", dtype="float16")


def _name(spec: EngineSpec) -> str:
    return f"{spec.family} {spec.dtype} {spec.layout} {spec.block_tokens} TP{spec.tp_size}"


@_NAMES_LAYOUTS
@pytest.mark.parametrize(("p", "d"), list(_unlike_backends()), ids=_name)
def test_unlike_backends_are_read(lab: Lab, p: EngineSpec, d: EngineSpec) -> None:
    assert_identical(lab.run(pair(p, d, BACKEND)))


@_NAMES_LAYOUTS
def test_a_cpus_keys_that_may_be_in_tiles_are_refused(lab: Lab) -> None:
    """A handshake says neither the one nor the other."""
    report = lab.run(pair(*_alike("cpu", "flash", dtype="bfloat16"), BACKEND))
    assert_refused(report, "the handshake does not say which P is", "--dtype float32")


@_NAMES_LAYOUTS
def test_rows_under_a_backends_name_whose_keys_lie_by_column_are_noticed(lab: Lab) -> None:
    """P has FlashAttention's tensors, and says that they are a CPU's: as many bytes, elsewhere."""
    lab.run(pair(accept=BACKEND, backend="CPU_ATTN")).must_be("corrupt")


@_NAMES_LAYOUTS
def test_without_the_factor_nothing_is_read(lab: Lab) -> None:
    report = lab.run(pair(_of("cpu"), _of("flash")))
    assert_refused(report, "P runs CPU_ATTN; this engine runs FLASH_ATTN")
