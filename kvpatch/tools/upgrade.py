"""Tells what kvpatch would do on a vLLM that is not installed: a tree, a folder, or a wheel."""

from __future__ import annotations

import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath

from kvpatch.core.errors import BadOptions, ReleaseNotKnown
from kvpatch.core.installed import vllm_in
from kvpatch.core.recognise import leaning, recognise
from kvpatch.core.releases import Build, listed
from kvpatch.core.source import Source
from kvpatch.observe.status import PatchStatus
from kvpatch.patches import SLUGS


@dataclass(frozen=True)
class Upgrade:
    """The patches that a build would get.

    Attributes:
        vllm: its version, and the release that it is taken for.
        problem: why it is refused, or empty.
        patches: a row per patch; none where the build is refused.
    """

    vllm: str
    problem: str
    patches: tuple[PatchStatus, ...]

    @property
    def healthy(self) -> bool:
        return not self.problem and all(p.outcome != "refused" for p in self.patches)

    @property
    def verdict(self) -> str:
        """The last line that is shown."""
        if self.problem:
            return f"kvpatch refuses this build: {self.problem}"
        refused = ",".join(p.slug for p in self.patches if p.outcome == "refused")
        if refused:
            return f"kvpatch works with vLLM {self.vllm} with KVPATCH_DISABLE={refused} alone"
        return f"kvpatch works with vLLM {self.vllm}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy, "verdict": self.verdict}


def upgrade_to(path: Path) -> Upgrade:
    """Says what a build would get if it were installed.

    Args:
        path: a wheel, a folder with the package ``vllm`` (a checkout, ``site-packages``), or that
            package.

    Raises:
        BadOptions: it is none of these.
    """
    root = _root(path)
    found = vllm_in(root)
    version = found.version if found else "of unknown version"
    try:
        build = _build(root, version)
    except ReleaseNotKnown as error:
        return Upgrade(version, str(error), ())
    return Upgrade(str(build), "", tuple(_row(build, slug) for slug in SLUGS))


def _root(path: Path) -> Path | ZipPath:
    found: list[Path | ZipPath] = [path, path.parent]
    if path.is_file() and zipfile.is_zipfile(path):
        found = [ZipPath(path)]
    elif path.name != "vllm":
        found = [path]
    for root in found:
        if root.joinpath("vllm/__init__.py").is_file():
            return root
    raise BadOptions(
        f"--against: expected a wheel or a folder with vllm/__init__.py, found none in {path}",
        "give a wheel of vLLM, a checkout, or the site-packages where it is installed",
    )


def _build(root: Path | ZipPath, version: str) -> Build:
    facts = listed(version)
    return recognise(Source(root), version) if facts is None else Build(version, facts)


def _row(build: Build, slug: str) -> PatchStatus:
    if slug in build.moved:
        return PatchStatus(slug, "refused", build.moved[slug])
    return PatchStatus(slug, "applied" if slug in leaning(build.facts.release) else "not needed")
