"""Enabling and disabling kvpatch in one process.

The connector is patched right after it is imported, by a hook that must not
raise: Python would fail that import and let the next one succeed unpatched.
Whatever goes wrong becomes a refusal, and a refusal becomes a tripwire on the
connector's constructor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import wrapt

from kvpatch.core import kvcacheds_patch, seams, settings
from kvpatch.core.errors import PatchRefused, ReleaseNotKnown, SiteDrifted
from kvpatch.core.installed import InstalledVllm, installed_build, installed_vllm
from kvpatch.core.ledger import Ledger, Patch, Wrapped
from kvpatch.core.releases import CONNECTORS, Build, ReleaseFacts
from kvpatch.core.version import __version__
from kvpatch.guard.allowed_peers import allowed_peers
from kvpatch.observe.status import PatchStatus, Status
from kvpatch.patches import FRONT_ENDS, SLUGS, load, load_one

_LOG = logging.getLogger("kvpatch")

_TRIPWIRE = "tripwire"
_SUPERSEDING = "superseding"
_RAY = "ray"

#: The same on every release: what names the variables that Ray's actors are given.
RAY_VARIABLES = ("vllm.ray.ray_env", "get_env_vars_to_copy")
_LEFT_BEHIND = "RAY_NON_CARRY_OVER_ENV_VARS"

#: What kvcached's own NIXL patch does is done by these; without one of them it stays.
_DO_KVCACHEDS_PART = ("kvcached_layout", "kvcached_regions", "block_count")


#: The names of the class that defines the connector's methods.
_OWNERS = tuple(dict.fromkeys(place.owner for place in CONNECTORS))


class Session:
    """The state of kvpatch in this process; there is one, :data:`SESSION`."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._enabled = False
        self._hooked: set[str] = set()
        self._vllm: InstalledVllm | None = None
        self._build: Build | None = None
        self._problem = ""
        self._rows: dict[str, PatchStatus] = {}

    def enable(self) -> None:
        if self._enabled:
            return
        _set_up(_LOG)
        # What cannot be read is an error now, and not with a request.
        allowed_peers()
        settings.check()
        for complaint in settings.complaints(SLUGS):
            _LOG.warning("kvpatch: %s", complaint)
        self._enabled = True
        self._vllm, self._build, self._problem = None, None, ""
        try:
            self._vllm = installed_vllm()
            self._build = installed_build(self._vllm)
        except ReleaseNotKnown as error:
            self._problem = str(error)
        self._rows = {slug: self._before_import(slug) for slug in SLUGS}
        if self._problem:
            _LOG.error("%s", self.status().summary())
        for module in {place.module for place in CONNECTORS}:
            self._when_imported(module, self._on_import)
        for module in () if self._facts is None else seams.front_end_modules(self._facts):
            for slug in FRONT_ENDS:
                self._when_imported(module, partial(self._on_front_end, slug))
        self._when_imported(kvcacheds_patch.MODULE, self._on_kvcached)
        self._when_imported(RAY_VARIABLES[0], self._on_ray)

    def disable(self) -> None:
        for place in self._ledger.undo():
            _LOG.warning("kvpatch: %s is wrapped by something else now and was left alone", place)
        self._enabled = False
        self._rows = {}

    def has_applied(self, slug: str) -> bool:
        row = self._rows.get(slug)
        return row is not None and row.outcome == "applied"

    @property
    def _facts(self) -> ReleaseFacts | None:
        return self._build.facts if self._build else None

    def status(self) -> Status:
        vllm = self._vllm
        return Status(
            kvpatch=__version__,
            enabled=self._enabled,
            vllm=f"{vllm.distribution} {self._build or vllm.version}" if vllm else None,
            generation=self._facts.generation if self._facts else None,
            problem=self._problem,
            patches=tuple(self._rows.values()),
        )

    @property
    def _moved(self) -> Mapping[str, str]:
        return self._build.moved if self._build else {}

    def _before_import(self, slug: str) -> PatchStatus:
        if self._facts is None:
            return PatchStatus(slug, "refused", "vLLM's generation is not known")
        if slug in settings.disabled_slugs():
            return PatchStatus(slug, "off", settings.DISABLE)
        return PatchStatus(slug, "waiting", "the connector has not been imported")

    def _when_imported(self, module: str, act: Callable[[ModuleType], None]) -> None:
        """Acts on a module now, or as soon as it is imported."""
        loaded = sys.modules.get(module)
        if loaded is not None:
            act(loaded)
        elif module not in self._hooked:
            # A hook cannot be taken back; one left over from an earlier enable()
            # serves this one too.
            self._hooked.add(module)
            wrapt.register_post_import_hook(act, module)

    def _on_front_end(self, slug: str, module: ModuleType) -> None:
        """Wraps what the API server has."""
        row = self._rows.get(slug)
        if not self._enabled or self._facts is None or row is None:
            return
        if row.outcome not in ("waiting", "applied") or slug in self._moved:
            return
        try:
            here = {
                site: wrapper
                for site, wrapper in load_one(slug).sites(self._facts).items()
                if site.is_front_end and module.__name__ == site.module
            }
            self._ledger.apply(slug, here)
        except SiteDrifted as error:
            _LOG.warning("kvpatch: %s is not applied to the API server: %s", slug, error)
            # Children of this process may be engines, whose scheduler checks what it is handed.
        # Nothing may leave an import hook.
        except Exception as error:  # noqa: BLE001
            self._rows[slug] = PatchStatus(slug, "refused", str(error))
            _LOG.exception("kvpatch: %s is not applied to %s", slug, module.__name__)

    def _on_ray(self, module: ModuleType) -> None:
        """Ray's workers are given the variables that vLLM knows, and kvpatch's too."""
        name = RAY_VARIABLES[1]
        function = vars(module).get(name)
        if function is None or not self._enabled:
            return
        for loaded_name, loaded in tuple(sys.modules.items()):
            # vLLM's other modules may have imported the function from it.
            if loaded_name.startswith("vllm.") and vars(loaded).get(name) is function:
                self._ledger.wrap(_RAY, loaded, name, _with_ours)

    def _on_kvcached(self, module: ModuleType) -> None:
        """kvcached's own patch may come after ours, and more than once."""
        patch = vars(module).get(kvcacheds_patch.PATCH_CLASS)
        if self._enabled and isinstance(patch, type) and kvcacheds_patch.APPLY in vars(patch):
            self._ledger.wrap(_SUPERSEDING, patch, kvcacheds_patch.APPLY, self._after_kvcached)

    def _after_kvcached(self, wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        self._supersede()
        return result

    def _does_kvcacheds_part(self) -> bool:
        return not set(_DO_KVCACHEDS_PART) & set(settings.disabled_slugs())

    def _supersede(self) -> None:
        places = self._ledger.supersede(_SUPERSEDING) if self._does_kvcacheds_part() else []
        if places:
            _LOG.info("kvpatch takes the place of kvcached's own NIXL patch: %s", ", ".join(places))

    def _on_import(self, module: ModuleType) -> None:
        if not self._enabled:
            return
        if self._facts is not None and module.__name__ != self._facts.connector.module:
            self._on_another(module, self._facts)
            return
        try:
            self._apply()
        # Nothing may leave an import hook, and no failure may pass for success:
        # whatever this is, the tripwire below turns it into a refusal to serve.
        except Exception as error:  # noqa: BLE001
            _LOG.exception("kvpatch: applying patches failed")
            self._problem = f"applying patches failed: {error!r}"
        status = self.status()
        if not status.refused:
            _LOG.info("%s", status.summary())
            return
        self._trip(module, status)

    def _on_another(self, module: ModuleType, facts: ReleaseFacts) -> None:
        """Trips connectors of a module in which the release has none, so that nothing is patched.

        A module that only hands on the connector of the release's own module is let be.
        """
        found = [c for c in _connectors_in(module) if c.__module__ == module.__name__]
        if not found:
            return
        reason = (
            f"it is of {module.__name__}, and {facts.release}, for which this vLLM is taken, has "
            f"the connector in {facts.connector.module}"
        )
        _LOG.error("kvpatch: a connector was imported that is not patched: %s", reason)
        for connector in found:
            refuse = partial(self._refuse_another, reason)
            self._ledger.wrap(_TRIPWIRE, connector, "__init__", refuse)

    def _refuse_another(
        self, reason: str, wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any
    ) -> None:
        raise PatchRefused(
            f"kvpatch cannot patch {type(instance).__name__} of {self.status().vllm}: {reason}",
            f"set {settings.GENERATION} to the release whose code it has, or reinstall vLLM and "
            f"unset it, or unset {settings.ENABLE}",
        )

    def _apply(self) -> None:
        if self._facts is None:
            return
        for patch in load():
            if self._rows[patch.slug].outcome == "waiting":
                self._rows[patch.slug] = self._apply_one(patch, self._facts)
        self._supersede()

    def _apply_one(self, patch: Patch, facts: ReleaseFacts) -> PatchStatus:
        switch = patch.switch
        if switch is not None and switch.read() == "off":  # what is off is not imported
            return PatchStatus(patch.slug, "off", f"{switch.variable} is off")
        found = patch.sites(facts)
        if not found:
            return PatchStatus(patch.slug, "not needed", patch.not_needed)
        if patch.slug in self._moved:
            return PatchStatus(patch.slug, "refused", self._moved[patch.slug])
        sites = {s: w for s, w in found.items() if not s.is_front_end}
        try:
            behind = self._ledger.apply(patch.slug, sites, supersede=self._does_kvcacheds_part())
        except SiteDrifted as error:
            return PatchStatus(patch.slug, "refused", str(error))
        if behind:
            _LOG.info(
                "kvpatch: %s takes the place of kvcached's own NIXL patch at %s",
                *(patch.slug, ", ".join(behind)),
            )
        return PatchStatus(patch.slug, "applied")

    def _trip(self, module: ModuleType, status: Status) -> None:
        """Makes constructing the connector raise, and says so now."""
        found = _connectors_in(module)
        _LOG.error("%s", status.summary())
        if not found:
            _LOG.error(
                "kvpatch: %s defines none of %s, so that nothing stops the connector: "
                "do not serve with it",
                *(module.__name__, ", ".join(_OWNERS)),
            )
        for connector in found:
            self._ledger.wrap(_TRIPWIRE, connector, "__init__", self._refuse_construction)

    def _refuse_construction(
        self, wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any
    ) -> None:
        status = self.status()
        refused = [p for p in status.patches if p.outcome == "refused"]
        reasons = status.problem or "; ".join(map(str, refused))
        slugs = ",".join(p.slug for p in refused)
        raise PatchRefused(
            f"kvpatch cannot patch {type(instance).__name__} of {status.vllm}: {reasons}",
            f"use a release that kvpatch supports, or set {settings.DISABLE}={slugs} to serve "
            f"without these patches, or unset {settings.ENABLE}",
        )


def _connectors_in(module: ModuleType) -> list[type]:
    return [c for c in map(vars(module).get, _OWNERS) if isinstance(c, type)]


def _with_ours(wrapped: Callable[..., set[str]], _: Any, *args: Any, **kwargs: Any) -> set[str]:
    """The release's names and ours, but for those that the user leaves behind."""
    left_behind = vars(sys.modules[RAY_VARIABLES[0]]).get(_LEFT_BEHIND, set())
    return set(wrapped(*args, **kwargs)) | (set(settings.to_copy()) - set(left_behind))


#: This process's session.
SESSION = Session()


def _set_up(logger: logging.Logger) -> None:
    """Gives `logger` the level asked for and, if no handler would see it, one of its own.

    vLLM configures its own logger only, so that the line which says what was
    patched would be dropped with the root logger's default level.
    """
    level = settings.log_level()
    if level is not None:
        logger.setLevel(level)
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
        logger.addHandler(handler)
