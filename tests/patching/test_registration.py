"""Which steps a registration takes, for every set of patches that are on."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from types import SimpleNamespace

import pytest

from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.ledger import Ledger, Site, Step
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.patches import load
from kvpatch.worker.state import worker_state

MODULE = "kvpatch_registering_target"
SITE = Site(MODULE, "Worker", "register_kv_caches", "function", ("self", "kv_caches"))
TENSORS, BUFFERED = {"a": "the device's"}, {"a": "the buffer's"}

#: What a step does, in the order in which all of them are taken.
DOES = {
    "host_buffer": "host buffer",
    "stale_blocks": "make a table",
    "digests": "make a table of digests",
    "failed_loads": "watch failed loads",
    "unlike_engines": "inspect",
    "block_count": "count blocks",
    "kvcached_regions": "show as they lie",
    "shared_tensors": "leave in once",
    "metrics": "describe",
}
#: Done when all else is, whatever that is.
_LAST = "named_factors"
#: Those that say themselves what is done.
PARTS = {"host_buffer", "failed_loads", "stale_blocks", "digests", "metrics"}


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """What was done, in order; nothing of it is."""
    done: list[str] = []

    def note(what: str, found: object = None):
        def step(*args: object) -> object:
            done.append(what)
            return found

        return step

    def before_the_release(what: str):
        def step(register, *more, **named):
            done.append(what + (" for a reader" if named.get("is_read_by_us") else ""))
            return register(more[-1])

        return step

    own = SimpleNamespace(cache=None)
    monkeypatch.setattr("kvpatch.load.reader_attachment.inspect", note("inspect", own))
    monkeypatch.setattr("kvpatch.kvcached.pools.count_blocks", note("count blocks"))
    monkeypatch.setattr(
        "kvpatch.load.shown_tensors.register_as_they_lie", before_the_release("show as they lie")
    )
    monkeypatch.setattr(
        "kvpatch.load.shown_tensors.register_once", before_the_release("leave in once")
    )
    monkeypatch.setattr("kvpatch.load.reader_attachment.attach_reader", note("attach"))
    monkeypatch.setattr(
        "kvpatch.peer.peer_hash.compare_by_factor",
        lambda release, *, checks: done.append("accept" if checks else "name"),
    )

    class Worker:
        def register_kv_caches(self, kv_caches):
            done.append(f"register {kv_caches['a']}")
            return "registered"

        def _read_blocks_for_req(self):
            raise NotImplementedError

    module = types.ModuleType(MODULE)
    module.Worker = Worker
    monkeypatch.setitem(sys.modules, MODULE, module)
    return done


def _part(done: list[str], slug: str, *_: object) -> dict[str, str]:
    """What a patch does itself; of ``host_buffer`` what it returns counts."""
    done.append(DOES[slug])
    return BUFFERED


def _steps(facts) -> dict[str, Step]:
    """The patches that have a step on a release, in the order in which they are applied."""
    found = {}
    for patch in load():
        for site, wrapper in patch.sites(facts).items():
            if site.name == "register_kv_caches":
                assert isinstance(wrapper, Step), f"{patch.slug} wraps it by itself"
                found[patch.slug] = wrapper
    return found


def _is_newest_with_its_steps(release: str) -> bool:
    """Whether no newer release has the same patches' steps.

    The pipeline is one for all releases: what it does depends on which steps are on.
    """
    slugs = set(_steps(FACTS[release]))
    newer = RELEASES[RELEASES.index(release) + 1 :]
    return all(set(_steps(FACTS[other])) != slugs for other in newer)


def _subsets(slugs):
    """All of them; of what comes last by itself, with each set or without it by turns."""
    others = [slug for slug in slugs if slug != _LAST]
    found = chain.from_iterable(combinations(others, count) for count in range(len(others) + 1))
    for number, on in enumerate(found):
        is_on = number % 2 or len(on) in (0, len(others))
        yield (*on, *((_LAST,) if is_on and _LAST in slugs else ()))
        if len(on) < 2 or len(on) == len(others):
            yield on


def _expected(on: frozenset[str], *, is_buffered: bool) -> list[str]:
    steps = [does for slug, does in DOES.items() if slug in on - {"metrics"}]
    if not is_buffered and "host_buffer" in on:
        steps.remove("host buffer")
    reads = "unlike_engines" in on
    steps = [f"{s} for a reader" if reads and s == "show as they lie" else s for s in steps]
    tensors = BUFFERED if is_buffered and "host_buffer" in on else TENSORS
    names = ["accept" if reads else "name"] if "named_factors" in on else []
    shown = [DOES["metrics"]] if "metrics" in on else []
    return [*steps, f"register {tensors['a']}", *(["attach"] if reads else []), *names, *shown]


@pytest.mark.parametrize("release", list(filter(_is_newest_with_its_steps, RELEASES)))
@pytest.mark.parametrize("is_buffered", [False, True])
@pytest.mark.parametrize("order", [1, -1])
def test_every_set_of_patches_takes_its_steps(release, is_buffered, order, taken):
    kind = sys.modules[MODULE].Worker
    original, every = vars(kind)["register_kv_caches"], _steps(FACTS[release])
    for slug in PARTS & every.keys():
        every[slug] = replace(every[slug], part=partial(_part, taken, slug))

    for on in map(frozenset, _subsets(tuple(_steps(FACTS[release])))):
        ledger, worker = Ledger(), kind()
        worker_state(worker).is_host_buffered = is_buffered
        for slug in list(every)[::order]:
            if slug in on:
                ledger.apply(slug, {SITE: every[slug]})
        taken.clear()
        if is_buffered and "host_buffer" in on and "unlike_engines" not in on:
            with pytest.raises(RegistrationRefused, match="leave it on"):
                worker.register_kv_caches(TENSORS)
            assert taken == []
        else:
            assert worker.register_kv_caches(kv_caches=TENSORS) == "registered"
            assert taken == _expected(on, is_buffered=is_buffered), sorted(on)
        assert ledger.undo() == []
        assert vars(kind)["register_kv_caches"] is original


def test_in_push_mode_nothing_goes_through_a_host_buffer(taken):
    kind = sys.modules[MODULE].Worker
    del kind._read_blocks_for_req
    ledger, worker = Ledger(), kind()
    worker_state(worker).is_host_buffered = True
    for slug, step in _steps(FACTS[RELEASES[-1]]).items():
        ledger.apply(slug, {SITE: step})

    with pytest.raises(RegistrationRefused, match="push mode"):
        worker.register_kv_caches(TENSORS)
    assert taken == []
