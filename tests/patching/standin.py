"""A stand-in vLLM: the modules, classes and methods that the sites name, and no more.

It lets import orders, undo and refusals be tried for every release in
milliseconds. That the real releases have these sites is what the contract tests
show, and that the patches work on them is what the lab shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from kvpatch.core.ledger import Site
from kvpatch.core.releases import ReleaseFacts
from kvpatch.patches import load

REPOSITORY = Path(__file__).resolve().parents[2]


def sites_of(facts: ReleaseFacts) -> list[Site]:
    """Every site that some patch wraps in a release, each once."""
    found = [site for p in load() for site in p.sites(facts)]
    return list(dict.fromkeys(found))


def write_tree(
    root: Path,
    facts: ReleaseFacts,
    release: str,
    distribution: str = "vllm",
    leave_out: str = "",
    rename_parameter: str = "",
) -> Path:
    """A tree that imports as vLLM `release`; optionally drifted in one method."""
    classes: dict[str, dict[str, list[str]]] = {facts.connector.module: {}}
    for site in sites_of(facts):
        methods = classes.setdefault(site.module, {}).setdefault(site.owner, [])
        if site.name != leave_out:
            methods.append(_method(site, site.name == rename_parameter))
    classes[facts.connector.module].setdefault(facts.connector.owner, [])
    for module, owners in classes.items():
        path = root / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"import {m}" for m in classes if m != module and module.endswith(".connector")]
        lines += [dedent(function) for function in owners.pop("", [])]
        for owner, methods in owners.items():
            init = "    def __init__(self): self.built = True\n"
            lines.append(f"class {owner}:\n{init}{''.join(methods)}")
        path.write_text("\n".join(lines) + "\n")
    for folder in {root / "vllm", *(root / "vllm").rglob("*")}:
        if folder.is_dir():
            (folder / "__init__.py").touch()
    info = root / f"{distribution.replace('-', '_')}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {release}\n")
    files = [path for path in (root / "vllm").rglob("*.py") if path.is_file()]
    listing = [f"{path.relative_to(root)},,{path.stat().st_size}\n" for path in files]
    (info / "RECORD").write_text("".join(listing))
    return root


def _method(site: Site, drifted: bool) -> str:
    parameters = [*site.parameters[:-1], "another"] if drifted else list(site.parameters)
    decorator = "" if site.kind == "function" else f"    @{site.kind}\n"
    body = f"        return {site.name!r}, {parameters[-1]}\n"
    return f"{decorator}    def {site.name}({', '.join(parameters)}):\n{body}"


def run(tree: Path, script: str, **environment: str) -> Any:
    """Runs `script` in a fresh interpreter that sees `tree` as vLLM.

    The script prints one JSON value as its last line, which is returned.
    """
    kept = {k: v for k, v in os.environ.items() if "KVPATCH" not in k and "KVCACHED" not in k}
    kept["PYTHONPATH"] = os.pathsep.join([str(tree), str(REPOSITORY)])
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise AssertionError(f"script failed:\n{answer.stdout}\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])
