from dataclasses import replace
import pytest
from .case import Case, EngineSpec
from .host import Lab
from kvpatch.patches import SLUGS

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]
B = EngineSpec(planned_blocks=32, layers=2, sharing_layers=2, kv_heads=4)
P = {
    "like": (B, B, 0),
    "like hit": (B, B, 32),
    "16-64": (B, replace(B, block_tokens=64), 0),
    "16-64 hit": (B, replace(B, block_tokens=64), 64),
    "64-16": (replace(B, block_tokens=64), B, 0),
    "tp12": (B, replace(B, tp_size=2), 0),
    "tp21": (replace(B, tp_size=2), B, 0),
    "tp24": (replace(B, tp_size=2), replace(B, tp_size=4), 0),
    "tp18": (B, replace(B, tp_size=8), 0),
    "tp81": (replace(B, tp_size=8), B, 0),
    "nhd-hnd": (replace(B, layout="NHD"), B, 0),
    "nhd 16-64": (replace(B, layout="NHD"), replace(B, layout="NHD", block_tokens=64), 0),
    "fi 16-64": (
        replace(B, family="flashinfer"),
        replace(B, family="flashinfer", block_tokens=64),
        0,
    ),
    "fi tp12": (replace(B, family="flashinfer"), replace(B, family="flashinfer", tp_size=2), 0),
    "mla 16-64": (
        replace(B, family="mla", head_dim=64),
        replace(B, family="mla", head_dim=64, block_tokens=64),
        0,
    ),
    "win like": (
        replace(B, window_tokens=(0, 64), layers=4),
        replace(B, window_tokens=(0, 64), layers=4),
        0,
    ),
    "win 16-64": (
        replace(B, window_tokens=(0, 64), layers=4),
        replace(B, window_tokens=(0, 64), layers=4, block_tokens=64),
        0,
    ),
    "win tp12": (
        replace(B, window_tokens=(0, 64), layers=4),
        replace(B, window_tokens=(0, 64), layers=4, tp_size=2),
        0,
    ),
}


@pytest.mark.parametrize("n", P)
def test_x(lab: Lab, n):
    p, d, hit = P[n]
    for on in (0, 1):
        dd = replace(d, patched=True, patches=SLUGS) if on else d
        r = lab.run(Case("zz", p, dd, prompt_tokens=150, prefix_hit_tokens=hit, n_requests=2))
        with open("/tmp/zz.txt", "a") as f:
            print(
                lab.release,
                "|",
                n,
                "|",
                on,
                "|",
                r.outcome,
                "|",
                str(r.detail)[-160:].replace("\n", " "),
                file=f,
            )
