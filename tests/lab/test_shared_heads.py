"""More ranks than KV heads on one side: ranks share heads, and releases refuse most of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec
from .host import Lab

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_SPEC = EngineSpec(planned_blocks=64, layers=2, head_dim=16, dtype="float32")


def _case(heads: int, p: tuple[int, int], d: tuple[int, int], layout: str = "HND") -> Case:
    """Of a model of so many heads; ranks and tokens of a block on either side."""
    prefill, decode = (
        replace(_SPEC, kv_heads=heads, tp_size=ranks, block_tokens=tokens)
        for ranks, tokens in (p, d)
    )
    name = f"{heads} heads, P {p[1]} on {p[0]} in {layout}, D {d[1]} on {d[0]}"
    return Case(name, replace(prefill, layout=layout), decode, prompt_tokens=200)


_CASES = (
    _case(2, (2, 32), (1, 64)),
    _case(2, (4, 32), (1, 32)),
    _case(2, (4, 64), (1, 48), "NHD"),
    _case(2, (4, 64), (2, 32)),
    _case(1, (2, 64), (1, 32)),
    _case(2, (1, 32), (4, 32)),
    _case(2, (1, 32), (4, 64), "NHD"),
    _case(2, (2, 32), (4, 64)),
)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_it_is_identical(lab: Lab, case: Case) -> None:
    lab.on_d(case).must_be("identical")


@pytest.mark.parametrize(
    ("case", "since"),
    [(_case(2, (2, 32), (1, 32)), "0.20"), (_case(2, (1, 32), (4, 32)), "0.24")],
    ids=["as many ranks as heads", "more of D's ranks"],
)
def test_what_stock_reads_stays_with_it(lab: Lab, case: Case, since: str) -> None:
    if Version(lab.release) < Version(since):
        pytest.skip("this release refuses it")

    stock = lab.run(case)
    patched = lab.on_d(case)

    stock.must_be("identical")
    assert replace(patched, seconds=0.0) == replace(stock, seconds=0.0)
