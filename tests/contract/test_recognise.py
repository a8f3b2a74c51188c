"""A build that is not listed is what its code is, and a stranger is told by file and function."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from functools import cache
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from kvpatch.core import recognise
from kvpatch.core.errors import ReleaseNotKnown
from kvpatch.core.recognise import BASES, OVERRIDES, Source, tables
from kvpatch.core.releases import FACTS, GENERATIONS, RELEASES
from kvpatch.tools.cli import app
from tests.releases.cache import tree
from tests.releases.renamed import renamed

from .source import code_of
from .tables import ROOT

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("trees")]

NEWEST = RELEASES[-1]
_ENDS = [releases[-1] for releases in GENERATIONS.values()]
#: Versions of builds that people run, a release whose code such a build may have, and as which
#: kvpatch takes it.
NAMES = (
    ("0.33.1", NEWEST, NEWEST),
    ("0.33.0.post1", NEWEST, NEWEST),
    ("0.33.0rc1", NEWEST, NEWEST),
    ("0.1.dev20073+g123", NEWEST, NEWEST),
    ("0.26.1rc1.dev657+g123", "0.26.0", "0.26.0"),
    ("0.20.2rc1.dev265+g123", "0.20.1", "0.20.2"),
)
_PACKAGE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"

#: Neighbours of which the one is taken for the other, and the patches that are refused then.
_ALIKE: dict[tuple[str, str], set[str]] = {
    ("0.10.1", "0.10.1.1"): set(),
    ("0.11.1", "0.11.2"): set(),
    ("0.14.0", "0.14.1"): set(),
    ("0.15.0", "0.15.1"): {"metrics", "stale_blocks"},
    ("0.18.0", "0.18.1"): set(),
    ("0.19.0", "0.19.1"): set(),
    ("0.20.1", "0.20.2"): set(),
    ("0.22.0", "0.22.1"): set(),
    ("0.25.0", "0.25.1"): set(),
    ("0.27.0", "0.27.1"): set(),
}


@pytest.fixture
def only(monkeypatch):
    """Hides all releases but one from recognition."""
    return lambda release: monkeypatch.setattr(recognise, "RELEASES", (release,))


@pytest.mark.parametrize("pair", [*pairwise(RELEASES)], ids="-".join)
def test_neighbours_are_taken_for_each_other_where_their_code_is_the_same(pair, only):
    for known, build in (pair, pair[::-1]):
        only(known)
        code = code_of(build)
        differs = {
            slug
            for (module, name), found in tables()[known].items()
            for slug in found.slugs or ("all",)
            if code.fingerprint(module, name, FACTS[known].package_of(module)) != found.fingerprint
        }
        if pair in _ALIKE:
            found = recognise.recognise(code, "9.9.9")
            assert found.facts is FACTS[known] and found.by_code
            assert set(found.moved) == differs == _ALIKE[pair]
        else:
            assert "all" in differs
            with pytest.raises(ReleaseNotKnown, match=f"of {known}, the nearest, differ vllm/"):
                recognise.recognise(code, "9.9.9")


@pytest.mark.parametrize("release", _ENDS)
def test_every_generation_is_recognised_among_all(release):
    found = recognise.recognise(code_of(release), "9.9.9")

    same = [r for r in RELEASES if {*tables()[r].items()} == {*tables()[release].items()}]
    assert not found.moved and found.facts.release in same
    assert str(found) == f"9.9.9 (as {found.facts.release}, by its code)"


@pytest.fixture(scope="module")
def original():
    return code_of(NEWEST)


class TestMutations:
    """Each thing that kvpatch leans on, changed in the newest release."""

    @pytest.fixture
    def refusal(self, original, only):
        only(NEWEST)

        def refusal(module: str, text: str) -> str:
            assert text != original.text(module)
            changed = Source(tree(NEWEST))
            changed._texts = {**original._texts, module: text}
            changed._parsed = {one: of for one, of in original._parsed.items() if one != module}
            known = original._fingerprints.items()
            owners = (OVERRIDES, BASES)
            changed._fingerprints = {
                k: f for k, f in known if k[0] != module and not k[1].endswith(owners)
            }
            try:
                found = recognise.recognise(changed, "0.33.1")
            except ReleaseNotKnown as error:
                return str(error)
            return "; ".join(found.moved.values())

        return refusal

    @pytest.mark.parametrize("how", ["renamed", "reordered", "changed"])
    def test_a_function(self, original, refusal, how):
        played = 0
        for module, name in tables()[NEWEST]:
            node = None if name.endswith((OVERRIDES, BASES)) else original.definition(module, name)
            if not isinstance(node, ast.FunctionDef):
                continue
            text = _MUTATIONS[how](original.text(module), name)
            if text is None:
                continue
            found = refusal(module, text)
            assert f"{module.replace('.', '/')}.py: expected {name}" in found, (name, found)
            played += 1
        assert played > (40 if how == "reordered" else 100)

    def test_a_field_and_a_base_of_a_class(self, original, refusal):
        played = 0
        for module, name in tables()[NEWEST]:
            plain = name.removesuffix(BASES)
            head = f"\nclass {plain}"
            if "." in name or head not in original.text(module) or name.endswith(OVERRIDES):
                continue
            before, after = original.text(module).split(head, 1)
            if name.endswith(BASES):
                line, rest = after.split(":\n", 1)
                bases = line.strip("()")
                text = f"{before}{head}({bases}{', ' if bases else ''}Mixin):\n{rest}"
            else:
                text = (
                    f"{before}{head}{after.replace(chr(10), chr(10) + '    more = 1' + chr(10), 1)}"
                )
            assert plain in refusal(module, text)
            played += 1
        assert played > 20

    def test_the_connectors_version(self, original, refusal):
        module = f"{_PACKAGE.replace('/', '.')}.metadata"
        text = original.text(module).replace("_VERSION: int = 15", "_VERSION: int = 16")

        assert "expected NIXL_CONNECTOR_VERSION to be 15, found 16" in refusal(module, text)

    def test_an_override_in_a_subclass(self, original, refusal):
        """As vLLM #57987 has it: the worker that reads overrides what kvpatch wraps on its base."""
        module, played = f"{_PACKAGE.replace('/', '.')}.pull_worker", 0
        base = "NixlBaseConnectorWorker."
        for name in [n for _, n in tables()[NEWEST] if n.startswith(base) and n[-1] == OVERRIDES]:
            method = name.removeprefix(base).removesuffix(OVERRIDES)
            if f"def {method}(" in original.text(module):
                continue
            text = f"{original.text(module)}\n    def {method}(self, *args):\n        return None\n"
            found = refusal(module, text)
            assert f"to override {base}{method}, found (NixlPull" in found
            played += 1
        assert played > 4

    @pytest.mark.parametrize(
        "change", ["# a comment\n", "\n\n_NEW = 1\n", "def new():\n    pass\n"]
    )
    def test_what_nobody_leans_on_may_change(self, original, refusal, change):
        module = f"{_PACKAGE.replace('/', '.')}.base_worker"
        assert refusal(module, original.text(module) + change) == ""


_parsed = cache(ast.parse)


def _lines(text: str, name: str) -> tuple[list[str], ast.FunctionDef]:
    found = recognise._find(_parsed(text).body, name.split("."))
    assert isinstance(found, ast.FunctionDef)
    return text.splitlines(keepends=True), found


def _rename(text: str, name: str) -> str:
    lines, node = _lines(text, name)
    lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"{node.name}(", f"{node.name}_(", 1)
    return "".join(lines)


def _change(text: str, name: str) -> str:
    lines, node = _lines(text, name)
    last = node.body[-1]
    lines.insert(last.lineno - 1, f"{' ' * last.col_offset}mutated = 1\n")
    return "".join(lines)


def _reorder(text: str, name: str) -> str | None:
    """The last two parameters by each other's names; None where there are not two."""
    lines, node = _lines(text, name)
    arguments = [a for a in node.args.args if a.arg not in ("self", "cls")][-2:]
    if len(arguments) < 2:
        return None
    for one, other in (arguments[::-1], arguments):  # the first may stand before it on a line
        line = lines[one.lineno - 1]
        start = one.col_offset
        lines[one.lineno - 1] = f"{line[:start]}{other.arg}{line[start + len(one.arg) :]}"
    return "".join(lines)


_MUTATIONS = {"renamed": _rename, "reordered": _reorder, "changed": _change}


class TestDoctor:
    """``kvpatch doctor`` on a build that is not listed."""

    def _run(self, *arguments: object) -> tuple[int, str]:
        found = CliRunner().invoke(
            app, ["doctor", "--against", *map(str, arguments)], env={"COLUMNS": "400"}
        )
        return found.exit_code, found.output

    @pytest.mark.parametrize(("version", "release", "taken_for"), NAMES)
    def test_a_release_by_another_name(self, tmp_path, version, release, taken_for):
        build = renamed(release, version, tmp_path / "build")

        status, out = self._run(build / "vllm")

        assert status == 0, out
        assert f"kvpatch works with vLLM {version} (as {taken_for}, by its code)" in out

    def test_a_wheel(self, tmp_path):
        build, wheel = renamed(NEWEST, "0.33.1", tmp_path / "build"), tmp_path / "vllm.whl"
        modules = {module for module, _ in tables()[NEWEST]}
        with zipfile.ZipFile(wheel, "w") as archive:
            for module in modules | {"vllm"}:
                for end in (".py", "/__init__.py"):
                    path = f"{module.replace('.', '/')}{end}"
                    if (build / path).is_file():
                        archive.write(build / path, path)
            for path in (build / "vllm-0.33.1.dist-info").iterdir():
                archive.write(path, f"vllm-0.33.1.dist-info/{path.name}")

        status, out = self._run(wheel, "--json")

        found = json.loads(out)
        assert status == 0 and found["vllm"] == f"0.33.1 (as {NEWEST}, by its code)"
        outcomes = {row["slug"]: row["outcome"] for row in found["patches"]}
        assert (
            outcomes["unlike_engines"] == "applied" and outcomes["shared_tensors"] == "not needed"
        )

    def test_one_patchs_code_has_moved(self, tmp_path):
        path = f"{_PACKAGE}/stats.py"
        text = _change((tree(NEWEST) / path).read_text(), "NixlKVConnectorStats.is_empty")
        build = renamed(NEWEST, "0.33.1", tmp_path / "build", {path: text})

        status, out = self._run(build)

        assert status == 1
        assert (
            f"{path}: expected NixlKVConnectorStats.is_empty as in {NEWEST}, found another" in out
        )
        assert out.count("refused") == 1 and "with KVPATCH_DISABLE=metrics alone" in out

    def test_a_listed_release(self):
        status, out = self._run(tree("0.15.1"))

        assert status == 0 and "kvpatch works with vLLM 0.15.1" in out

    @pytest.mark.parametrize("name", ["", "missing", "pyproject.toml"])
    def test_no_vllm(self, name):
        status, out = self._run(ROOT / name)

        assert status == 2 and "expected a wheel or a folder with vllm/__init__.py" in out


_TAKEN_FOR = (
    "import sys; from kvpatch.core.installed import installed_build\n"
    "build = installed_build(); print(build.facts.release, build.by_code)\n"
    "print([name for name in sys.modules if name in ('ast', 'json')"
    " or name.startswith(('kvpatch.core.rec', 'vllm'))])"
)


def _taken_for(*path):
    """Returns what kvpatch takes the vLLM for that is first on a path, and modules it imports."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", _TAKEN_FOR],
        env={"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_listed_version_is_not_compared():
    """Neither what reads source is imported then, nor what is known of it."""
    taken_for, modules = _taken_for(tree(NEWEST))

    assert taken_for == f"{NEWEST} False"
    assert not any(name in modules for name in ("recognise", "'vllm"))


#: Code, the metadata of another release, and the release as which kvpatch takes it.
_STALE = [
    ("0.12.0", "0.11.2", "0.12.0 True"),
    ("0.20.0", "0.19.1", "0.20.0 True"),
    ("0.25.0", "0.24.0", "0.25.1 True"),  # whose code is the same
    ("0.25.0", "0.25.0", "0.25.0 False"),
]


@pytest.mark.parametrize(("code", "version", "expected"), _STALE)
def test_metadata_elsewhere_is_not_trusted(code, version, expected, tmp_path):
    """An editable install that git has moved, or a checkout before an installed wheel."""
    checkout, site = (renamed(code, version, tmp_path / name) for name in ("checkout", "site"))
    for path in (checkout / f"vllm-{version}.dist-info").iterdir():
        path.unlink()
    (checkout / f"vllm-{version}.dist-info").rmdir()

    assert _taken_for(checkout, site)[0] == expected


@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize(("code", "version", "expected"), _STALE)
def test_metadata_of_other_files_is_not_trusted(code, version, expected, has_sizes, tmp_path):
    build = renamed(code, version, tmp_path / "build")
    if has_sizes:  # files that were copied over an installed wheel's
        record = next(tree(version).glob("*.dist-info/RECORD")).read_text()
        (build / f"vllm-{version}.dist-info" / "RECORD").write_text(record)

    taken_for, modules = _taken_for(build)

    assert taken_for == expected
    assert ("recognise" not in modules) == (has_sizes and code == version)


def test_a_changed_release_is_refused_by_its_version(tmp_path):
    path = f"{_PACKAGE}/base_worker.py"
    text = (tree(NEWEST) / path).read_text().replace("def register_kv_caches(", "def renamed(", 1)
    build = renamed(NEWEST, NEWEST, tmp_path / "build", {path: text})

    with pytest.raises(ReleaseNotKnown, match=f"the code of vLLM {NEWEST} is none of a release"):
        recognise.recognise(Source(build), NEWEST)
