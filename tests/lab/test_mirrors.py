"""vLLM's own host buffer, which mirrors the whole cache of a device in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import MIRRORED, Case, EngineSpec
from .host import Lab

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

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
WIDE = replace(SPEC, block_tokens=64)
TOKENS = 150
PAIRS = {
    "like": (SPEC, SPEC),
    "16 to 64": (SPEC, WIDE),
    "64 to 16": (WIDE, SPEC),
    "1 to 2": (SPEC, replace(SPEC, tp_size=2)),
    "2 to 1": (replace(SPEC, tp_size=2), SPEC),
    "P plain": (replace(SPEC, device=""), SPEC),
    "D plain": (SPEC, replace(SPEC, device="")),
    "NHD": (replace(SPEC, layout="NHD"), replace(SPEC, layout="NHD")),
    "NHD 16 to 64": (replace(SPEC, layout="NHD"), replace(WIDE, layout="NHD")),
    "P pool": (replace(SPEC, patched=True, own_scheduler=True, settings=(("KVPATCH_HOST_BUFFER", "always"),)), SPEC),
    "D pool": (SPEC, replace(SPEC, patched=True, own_scheduler=True, settings=(("KVPATCH_HOST_BUFFER", "always"),))),
    "mla": (replace(SPEC, family="mla", head_dim=64), replace(SPEC, family="mla", head_dim=64)),
    "mla 16 to 64": (replace(SPEC, family="mla", head_dim=64), replace(WIDE, family="mla", head_dim=64)),
    "flashinfer": (replace(SPEC, family="flashinfer"), replace(SPEC, family="flashinfer")),
}


@pytest.mark.parametrize("on", ["stock", "auto"])
@pytest.mark.parametrize("name", PAIRS)
def test_what_becomes(lab: Lab, name: str, on: str) -> None:
    p, d = PAIRS[name]
    if on != "stock":
        d = replace(d, patched=True, settings=d.settings or (("KVPATCH_HOST_BUFFER", on),))
    report = lab.run(Case(name, p, d, prompt_tokens=TOKENS, n_requests=2))
    with open("/tmp/mirrors.txt", "a") as f:
        print(lab.release, "|", name, "|", on, "|", report.outcome, "|", report.wrong if hasattr(report,"wrong") else "", str(report.detail)[-300:].replace("\n", " "), file=f)

from kvpatch.patches import SLUGS
@pytest.mark.parametrize("without", ["", *SLUGS])
def test_dbg(lab: Lab, without: str) -> None:
    d = replace(SPEC, patched=True, patches=tuple(s for s in SLUGS if s != without))
    report = lab.run(Case("x", SPEC, d, prompt_tokens=TOKENS, n_requests=2))
    with open("/tmp/dbg.txt", "a") as f:
        print(lab.release, "|", without, "|", report.outcome, str(report)[:300], file=f)
