"""Every release's real source, against every patch."""

from __future__ import annotations

import inspect

import pytest

from kvpatch.core.ledger import Parts, Site, Step
from kvpatch.core.recognise import Source, tables
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.patches import load
from kvpatch.session import RAY_VARIABLES

from . import contract, documents, source

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("trees")]


@pytest.mark.parametrize("release", RELEASES)
def test_every_patch_has_an_outcome_and_none_is_refused(release):
    cells = {p.slug: contract.cell(p, release, FACTS[release]) for p in load()}

    refused = {slug: c.reason for slug, c in cells.items() if c.outcome == "refused"}
    assert not refused
    assert all(c.outcome == "applied" or c.reason for c in cells.values()), "a reason for each"


@pytest.mark.parametrize("release", RELEASES)
def test_the_bodies_that_patches_lean_on_are_the_ones_that_were_read(release):
    assert contract.fingerprints(release, FACTS[release]) == tables()[release]


@pytest.mark.parametrize("release", RELEASES)
def test_rays_workers_get_what_one_function_names(release):
    found = source.method(release, *RAY_VARIABLES)
    assert isinstance(found, source.Method), found


def _names_them(site, taken):
    """Whether what stands in a method's place names its first arguments, and takes the rest."""
    is_shared = isinstance(taken, Step)
    function = taken.replace(lambda *_, **__: None, Parts()) if is_shared else taken
    found = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    found = found[1:] if is_shared else found[2:]  # behind the object, and the method before it
    names = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
    asked = [name for name in site.parameters if name not in ("self", "cls")]
    takes_more = any(one.kind is one.VAR_POSITIONAL for one in found)
    return names == asked[: len(names)] and (takes_more or len(names) == len(asked))


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_that_are_passed_by_name_arrive(release):
    sites = [(s, taken) for p in load() for s, taken in p.sites(FACTS[release]).items()]
    assert len(sites) > 30
    assert not [str(site) for site, taken in sites if not _names_them(site, taken)]


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (lambda wrapped, instance, one, two: None, True),
        (lambda wrapped, instance, one, *more, **named: None, True),
        (lambda wrapped, instance, *args, **kwargs: None, True),
        (lambda wrapped, instance, one: None, False),
        (lambda wrapped, instance, one, other: None, False),
        (Step(lambda method, parts: lambda self, one, two: None), True),
        (Step(lambda method, parts: lambda self, two, one: None), False),
    ],
)
def test_negative_control_another_name_is_noticed(taken, expected):
    site = Site("a", "B", "c", "function", ("self", "one", "two"))
    assert _names_them(site, taken) == expected


def test_patches_md_is_fresh():
    expected = documents.patches_md()
    found = documents.PATCHES_MD.read_text()
    assert found == expected, "run python -m tests.contract --write"


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ("def register_kv_caches(self, kv_caches): return 1", ""),
        ("def register_kv_caches(self, kv_caches, more): return 1", "(self, kv_caches, more)"),
        ("@staticmethod\n    def register_kv_caches(self, kv_caches): return 1", "staticmethod"),
        ("def another(self): return 1", "defines no register_kv_caches"),
    ],
)
def test_negative_control_a_site_that_has_moved_is_noticed(definition, says, tmp_path, monkeypatch):
    patch = next(patch for patch in load() if patch.slug == "unlike_engines")
    site = next(iter(patch.sites(FACTS[RELEASES[-1]])))
    monkeypatch.setenv("KVPATCH_TEST_CACHE", str(tmp_path))
    path = tmp_path / "9.9.9" / (site.module.replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    path.write_text(f"class {site.owner}:\n    {definition}\n")

    found = contract.drift("9.9.9", site)

    assert says in found if says else found == ""


def test_a_body_that_moved_has_another_fingerprint(tmp_path):
    found = {}
    for name, head, body in (
        ("one", "x", "return 1"),
        ("other body", "x", "return 2"),
        ("other parameter", "y", "return 1"),
        ("comment and annotation", "x: int", "return 1  # same"),
    ):
        (tmp_path / name).mkdir()
        text = f"def f({head}):\n    '''Doc {name}.'''\n    {body}\n"
        (tmp_path / name / "m.py").write_text(text)
        found[name] = Source(tmp_path / name).fingerprint("m", "f", "")

    # The same with each version of Python.
    assert found["one"] == found["comment and annotation"] == "7aa1563840dc"
    assert len({*found.values()}) == 3
