from dataclasses import replace
import pytest
from .case import Case, EngineSpec
from .host import Lab
from .test_strides import _on, _run, _SPEC
pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]
@pytest.mark.parametrize("layers", [1,2,4])
@pytest.mark.parametrize("family", ["flash","flashinfer","triton","mla"])
@pytest.mark.parametrize("alloc", ["pool","plain", "padded", "permuted"])
def test_x(lab: Lab, layers, alloc, family):
    spec = replace(_SPEC, layers=layers, allocation=alloc, family=family, device="cuda")
    for on in (0, 1):
        r = _run(lab, *([_on(spec)]*2 if on else [spec]*2))
        with open("/tmp/dbg2.txt", "a") as f:
            print(lab.release, "|", family, alloc, layers, "|", on, "|", r.outcome, "|", str(r.detail)[:100].replace("\n"," "), file=f)
