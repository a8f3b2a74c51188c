"""A scheduler with kvpatch and workers without it: Ray's, or a headless node's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from kvpatch.patches import SLUGS

from .case import Case, EngineSpec
from .host import Lab
from .releases import states_block_size

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]


def _case(p_tokens: int, prompt_tokens: int) -> Case:
    prefill, decode = (EngineSpec(block_tokens=tokens) for tokens in (p_tokens, 32))
    case = Case(f"{p_tokens} to 32, {prompt_tokens} tokens", prefill, decode, prompt_tokens, 32)
    return case.patched(*SLUGS, prefill=False)


@pytest.fixture(autouse=True)
def _workers_are_heard_at_the_handshake(lab: Lab) -> None:
    if not states_block_size(lab.release):
        pytest.skip("no worker without kvpatch announces a peer here: D computes all prompts")


def _with_stock_workers(case: Case) -> Case:
    return replace(case, decode=replace(case.decode, stock_workers=True))


def test_what_a_stock_worker_would_read_wrongly_does_not_reach_it(lab: Lab) -> None:
    case = _case(16, 40)
    is_refused = Version("0.23") <= Version(lab.release) < Version("0.26")  # 16 are no 32 there
    stock = lab.run(case.stock()).outcome
    assert stock == ("refused" if is_refused else "corrupt"), "what such a worker makes of it"

    report = lab.run(_with_stock_workers(case))

    assert report.outcome == "failed", report
    assert "its patch unlike_engines is not in this worker" in report.detail


def test_a_like_peer_is_read_as_stock_reads_it(lab: Lab) -> None:
    case = _case(32, 80)

    assert lab.run(_with_stock_workers(case)).outcome == lab.run(case.stock()).outcome
