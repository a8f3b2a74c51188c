"""The cases that every release is put through.

`like_pairs` are what stock serves, and what must stay so with kvpatch on.
`known_failures` are what stock does not serve somewhere.
"""

from __future__ import annotations

from dataclasses import replace

from .case import Case, EngineSpec

LAYOUTS = ("HND", "NHD")


def pair(spec: EngineSpec, decode_blocks: int = 24) -> tuple[EngineSpec, EngineSpec]:
    """Two engines of one geometry; only their numbers of blocks differ."""
    return spec, replace(spec, planned_blocks=decode_blocks)


def like_pairs(layout: str) -> list[Case]:
    """One geometry on both sides, in `layout`: every kind of prompt."""
    p, d = pair(EngineSpec(layout=layout))
    big_p, big_d = pair(EngineSpec(layout=layout, block_tokens=64, dtype="float32"))
    small_p, small_d = pair(EngineSpec(layout=layout, dtype="fp8", layers=3, kv_heads=2))
    return [
        Case(f"{layout} one token", p, d, prompt_tokens=1),
        Case(f"{layout} one block", p, d, prompt_tokens=16),
        Case(f"{layout} seven blocks, not aligned", p, d, prompt_tokens=107),
        Case(f"{layout} some of it cached", p, d, prompt_tokens=57, prefix_hit_tokens=32),
        Case(f"{layout} all of it cached", p, d, prompt_tokens=48, prefix_hit_tokens=48),
        Case(f"{layout} four at once", p, d, prompt_tokens=70, n_requests=4),
        Case(f"{layout} blocks of 64, 4-byte items", big_p, big_d, prompt_tokens=150),
        Case(f"{layout} 1-byte items", small_p, small_d, prompt_tokens=40),
    ]


def known_failures() -> list[Case]:
    """Pairs that kvpatch exists for."""
    p, d = pair(EngineSpec(), 32)
    nhd_p, nhd_d = pair(EngineSpec(layout="NHD"), 32)
    share_p, share_d = pair(EngineSpec(layers=34, tensors=5, allocation="shared_tensors"))
    half = {"allocation": "split_half"}
    flashinfer_p, flashinfer_d = pair(EngineSpec("flashinfer", "NHD"))
    return [
        Case("D over-allocated, twice", p, replace(d, tensor_blocks=64)),
        Case("D over-allocated, 3 more", p, replace(d, tensor_blocks=35)),
        Case("P over-allocated, twice", replace(p, tensor_blocks=64), d),
        Case("both over-allocated", replace(p, tensor_blocks=48), replace(d, tensor_blocks=40)),
        Case("D under-allocated", p, replace(d, tensor_blocks=28)),
        Case("34 layers over 5 tensors", share_p, share_d),
        Case("kvcached split-half NHD", replace(nhd_p, **half), replace(nhd_d, **half)),
        Case("kvcached split-half P, plain D", replace(nhd_p, **half), nhd_d),
        Case("FlashInfer split-half", replace(flashinfer_p, **half), replace(flashinfer_d, **half)),
    ]
