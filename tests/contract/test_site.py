"""The site's build fails where a link is broken, and says which."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

_ROOT = Path(__file__).resolve().parents[2]
_TOOLS = _ROOT / ".cache" / "env-tools" / "bin" / "python"


@pytest.mark.skipif(not _TOOLS.exists(), reason="experiments/env_tools.sh has not been run")
@pytest.mark.parametrize(("link", "status"), [("there.md", 0), ("gone.md", 1)])
def test_a_broken_link_fails_and_is_named(tmp_path: Path, link: str, status: int) -> None:
    for folder in ("docs", "experiments"):
        (tmp_path / folder).mkdir()
    shutil.copy(_ROOT / "experiments" / "docs.sh", tmp_path / "experiments")
    tools = tmp_path / "experiments" / "env_tools.sh"
    tools.write_text(f"#!/bin/sh\necho {_TOOLS}\n")
    tools.chmod(0o755)
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: a site\nvalidation: {links: {not_found: warn}}\n"
    )
    (tmp_path / "docs" / "index.md").write_text(f"[a link]({link})\n")
    (tmp_path / "docs" / "there.md").write_text("A page.\n")

    done = subprocess.run(
        [tmp_path / "experiments" / "docs.sh"], capture_output=True, text=True, check=False
    )

    assert done.returncode == status, done.stderr
    assert ("gone.md" in done.stderr) == bool(status)
