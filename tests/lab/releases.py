"""Which releases a run of the lab covers."""

from __future__ import annotations

import os
from dataclasses import replace

from packaging.version import Version

from kvpatch.core.releases import FACTS, GENERATIONS, RELEASES

from .case import PEER_BLOCK_SIZE, PEER_LAYOUT, Case, EngineSpec

_VARIABLE = "KVPATCH_TEST_RELEASES"
_FULL = "KVPATCH_TEST_FULL"


def selected() -> list[str]:
    """The newest release of each generation; all, the newest, or a comma list, by variable."""
    wanted = os.environ.get(_VARIABLE, "")
    if not wanted:
        return ends_of_generations()
    if plays_all():
        return list(RELEASES)
    if wanted == "newest":
        return [newest()]
    chosen = [release.strip() for release in wanted.split(",") if release.strip()]
    unknown = sorted(set(chosen) - set(RELEASES))
    if unknown:
        raise ValueError(f"{_VARIABLE}: {', '.join(unknown)} not among {', '.join(RELEASES)}")
    return chosen


def newest() -> str:
    """The newest release, which plays all there is in every run."""
    return RELEASES[-1]


def ends_of_generations() -> list[str]:
    return [releases[-1] for releases in GENERATIONS.values()]


def some_ends_of_generations() -> list[str]:
    """Of every third generation, the last among them."""
    return ends_of_generations()[::-1][::3]


def plays_all() -> bool:
    """Whether every release was asked for."""
    return os.environ.get(_VARIABLE) == "all"


def is_listed() -> bool:
    """Whether releases were asked for by name: each then plays all there is."""
    return os.environ.get(_VARIABLE, "") not in ("", "all")


def is_full() -> bool:
    """Whether whole products are played, hours of them, where a selection is otherwise."""
    return os.environ.get(_FULL, "").lower() in ("true", "1")


def has_named_layouts(release: str) -> bool:
    """Whether the release names its cache layouts (0.29 on)."""
    return FACTS[release].names_layouts


def has_runners_rows(release: str) -> bool:
    """Whether a runner lays out DeepSeek-V4's blocks, as rows of all layers in one region."""
    return Version("0.24") <= Version(release) < Version("0.29")


def states_block_size(release: str) -> bool:
    """On releases <= 0.11.0 the handshake has a block's bytes, and not its tokens."""
    return FACTS[release].states_block_size


def states_kernel_blocks(release: str) -> bool:
    """On releases <= 0.20 the handshake does not say how many kernel blocks a block has."""
    return FACTS[release].states_kernel_blocks


def tells_blocks(release: str) -> bool:
    """Whether a handshake says all of a block; <= 0.20 D may have to be told."""
    return states_block_size(release) and states_kernel_blocks(release)


def must_be_told(decode: EngineSpec, release: str) -> bool:
    """Whether D has to be told what P's handshake does not say.

    From 0.11.1 on where a backend cuts blocks: FlashInfer, AITER, an indexer's. In 0.11.1 and
    0.11.2 FlashAttention takes blocks of 16, 32 and 64 tokens alone, and a CPU's are misread.
    """
    is_on = decode.patched and (not decode.patches or "unlike_engines" in decode.patches)
    if not is_on or tells_blocks(release) or decode.is_told:
        return False
    if decode.is_mirrored and states_block_size(release):
        return False
    cuts = decode.family in ("flashinfer", "aiter") or decode.has_indexer
    if not states_block_size(release) or cuts:
        return True
    return misreads_cpu_blocks(release) and decode.family in ("flash", "cpu")


def declaring(case: Case, release: str) -> Case:
    """The case with a D whose operator says what a stock P's handshake does not say of its blocks.

    A P with kvpatch states it.
    """
    if case.prefill.patched or not must_be_told(case.decode, release):
        return case
    said = [(PEER_BLOCK_SIZE, str(case.prefill.block_tokens))]
    if not states_layout(release):
        # Triton's is NHD <= 0.17, whatever was asked for.
        of_backend = "NHD" if case.prefill.family == "triton" else case.prefill.layout
        said.append((PEER_LAYOUT, of_backend))
    decode = replace(case.decode, settings=(*case.decode.settings, *said))
    return replace(case, decode=decode)


def registers_cpu_caches(release: str) -> bool:
    """<= 0.11.0 a connector has no CPU backend; 0.23 to 0.25 take blocks for keys and values."""
    version = Version(release)
    return version >= Version("0.11.1") and not Version("0.23") <= version < Version("0.26")


def misreads_cpu_blocks(release: str) -> bool:
    """0.11.1 and 0.11.2 take the heads of a CPU's cache for the tokens of its blocks.

    Two engines of theirs, however alike, read nothing from each other, and D ends by it.
    """
    return release in ("0.11.1", "0.11.2")


def has_tpus(release: str) -> bool:
    """0.10.2 to 0.13 have a backend of TPUs that imports without them."""
    return Version("0.10.2") <= Version(release) < Version("0.14")


def states_layout(release: str) -> bool:
    """0.10.0 does not."""
    return FACTS[release].states_layout


def moves_full_blocks_only(release: str) -> bool:
    """0.10.0 leaves the last, partial block of a prompt to the decode side."""
    return FACTS[release].loads_whole_blocks_only
