"""P and D in two network namespaces: UCX over TCP on a line of our own, and no memory in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from .case import Case, EngineSpec
from .host import Lab
from .namespaces import Line, NoNamespaces, line
from .releases import newest
from .stage import Stage
from .test_failures import STAGED, assert_failed_alone, untouched
from .test_several_peers import TOKENS, assert_identical, engine, held, loaded

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(has=lambda release: release == newest()),
]


@contextmanager
def _line_or_skip(delay_seconds: float = 0.0, loss: float = 0.0) -> Iterator[Line]:
    try:
        with line(delay_seconds, loss) as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(str(error))


def _at(made: Line, end: int, spec: EngineSpec) -> EngineSpec:
    return replace(spec, settings=(*spec.settings, *made.settings(end)))


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_a_line_that_is_slow_and_loses_packets(lab: Lab, transfer: str) -> None:
    forced = (("KVPATCH_TRANSFER", transfer),)
    p = EngineSpec(block_tokens=16, planned_blocks=128)
    d = EngineSpec(block_tokens=64, settings=forced)
    with _line_or_skip(delay_seconds=0.02, loss=0.01) as made:
        case = Case("far away", _at(made, 0, p), _at(made, 1, d), prompt_tokens=300, n_requests=4)
        case = case.patched(prefill=False)

        report = lab.run(case)

        report.must_be("identical")
        assert report.seconds > 4 * 0.02
        assert made.lost and made.carried > 100


def test_a_line_that_goes_down_in_mid_transfer(lab: Lab) -> None:
    with _line_or_skip() as made, Stage(lab) as stage:
        prefill = stage.prefill(_at(made, 0, engine(block_tokens=32)))
        decode = stage.decode(_at(made, 1, STAGED))
        first, lost = stage.prompts(2, TOKENS)
        decode.ask(*prefill.compute(first))
        assert_identical(decode, [first], loaded(first, lab.release))
        asks = prefill.compute(lost)

        with held(prefill):
            decode.ask(*asks)
            assert not decode.watch(lost, seconds=0.2).failed
            made.cut()
        assert_failed_alone(decode, lab.release, [lost])
        assert untouched(decode, [lost])

        made.mend()
        other = stage.prefill(_at(made, 0, engine(block_tokens=32)))
        stage.load(other, decode, TOKENS)
        assert decode.strays() == 0
