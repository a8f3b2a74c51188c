"""An engine's arguments where it runs already: what it answers, and a file beside that.

What it answers wins, and where a file says another thing, that is told. What neither says is no
guess: of an engine without a file it is asked for, and beside a file vLLM's default is said aloud.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.tools.api_server import METRICS, SCHEMES
from kvpatch.tools.planning.answers import VARIABLES, Answers, Told, ask
from kvpatch.tools.planning.arguments import (
    ENV,
    SECTION,
    Contradiction,
    EngineArguments,
    Running,
    arguments_given,
    as_mapping,
    plain,
    read_arguments,
)
from kvpatch.tools.planning.description import Description

#: What a plan must be told, and an engine may keep to itself.
_NEEDED = ("model", "block_size", "dtype", "tensor_parallel_size", "kv_transfer_config")
_NEEDED_ABOUT = ("platform", "attention-backend")
#: vLLM's own defaults, where its arguments are known and do not say another.
_DEFAULTS = {
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": "true where it can be",
}
_NEGATED_CACHING = "no_enable_prefix_caching"
_ONE_WORD = {"half": "float16", "float": "float32"}
_PORTS = {"http": 80, "https": 443}


def arguments_of(
    source: str, overrides: Mapping[str, Any], *, asks_running: bool
) -> EngineArguments:
    """A side's arguments: from a file, from the URL of a running engine, or from both.

    Args:
        overrides: entries of the section that the command line gives.
        asks_running: whether an engine is asked that a file names.

    Raises:
        BadOptions: there is no such file, it holds something else, or something is missing.
        RequestFailed: the engine does not answer, or it is no vLLM.
        ReleaseNotKnown: it is none of kvpatch's releases.
    """
    if source.startswith(SCHEMES):
        answers = ask(source)
        alone = _Merging(arguments_given(source, overrides), answers, None).merged()
        _require_all(alone, answers.silences)
        return alone
    if "://" in source:
        raise BadOptions(
            f"{source} is neither a file nor a URL like http://127.0.0.1:8000",
            "give a file, or a URL with http:// or https://",
        )
    written = read_arguments(Path(source), overrides)
    if written.running:
        _require_all(written, written.assumed)
    url = written.about.get("url")
    if url is None or not asks_running:
        return written
    return _Merging(written, ask(str(url)), source).merged()


def description_of(url: str) -> dict[str, Any]:
    """The description of a running engine, as far as it tells what it is.

    Raises:
        BadOptions: that is no URL.
        RequestFailed: the engine does not answer, or it is no vLLM.
        ReleaseNotKnown: it is none of kvpatch's releases.
    """
    answers = ask(url)
    merged = _Merging(arguments_given(url, {}), answers, None).merged()
    return replace(merged, described=Description(answers.version)).as_description()


def require_url(sides: Sequence[EngineArguments]) -> None:
    """Raise :class:`BadOptions` where running engines are to be asked and no side has a URL."""
    if not any(side.running for side in sides):
        raise BadOptions(
            "--from-url: expected a URL for P or D, or a file with `url` in its section "
            f"{SECTION}, found neither",
            "give a URL, or leave out --from-url",
        )


def _require_all(found: EngineArguments, silences: Sequence[str]) -> None:
    """Raise :class:`BadOptions` for what neither the engine nor the command line has said."""
    missing = [plain(name) for name in _NEEDED if found.options.get(name) is None]
    is_cpu = found.about.get("platform") == "cpu"  # has one backend
    missing += [
        name
        for name in _NEEDED_ABOUT
        if found.about.get(name) is None and not (is_cpu and name == "attention-backend")
    ]
    if not missing:
        return
    raise BadOptions(
        f"{found.source} does not tell {', '.join(missing)} ({'; '.join(silences)})",
        "write "
        f"what it was started with into a file as vllm serve --config takes it, with `{SECTION}: "
        f"{{url: {found.source}, platform: ..., attention-backend: ...}}`, and give the file with "
        "--from-url in place of the URL",
    )


@dataclass
class _Merging:
    """One engine's answers over its file.

    Attributes:
        path: of the file; None where there is none.
    """

    written: EngineArguments
    answers: Answers
    path: str | None
    contradictions: list[Contradiction] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def merged(self) -> EngineArguments:
        """The arguments of the engine that runs."""
        self.origins = dict(self.written.origins)
        options = self._options()
        about = self._over(self._written_about(), self.answers.about)
        environment = self._environment()
        misses_kvpatch = self._set_kvpatch(environment)
        self._place(options)
        running = Running(
            url=self.answers.url,
            version=self.answers.version,
            misses_kvpatch=misses_kvpatch,
            misses_connector=self.answers.shows_connector is False,
            contradictions=tuple(self.contradictions),
        )
        return replace(
            self.written,
            options=options,
            about=about,
            environment=environment,
            origins=self.origins,
            assumed=tuple(self._assumed(options)),
            running=running,
        )

    def _options(self) -> dict[str, Any]:
        written = dict(self.written.options)
        if "model_tag" in written:
            written.setdefault("model", written.pop("model_tag"))
            self.origins.setdefault("model", self.origins.pop("model-tag", self.written.source))
        if _NEGATED_CACHING in written and "enable_prefix_caching" in self.answers.options:
            written["enable_prefix_caching"] = written.pop(_NEGATED_CACHING) is not True
        return self._over(written, self.answers.options)

    def _written_about(self) -> dict[str, Any]:
        """With the backend that an option asks for where the engine answers which one it has."""
        found, options = dict(self.written.about), self.written.options
        backend = options.get("attention_backend")
        if backend is not None and "attention-backend" in self.answers.about:
            found.setdefault("attention-backend", backend)
        return found

    def _over(self, written: Mapping[str, Any], answered: Mapping[str, Told]) -> dict[str, Any]:
        """What is answered over what is written, and what contradicts."""
        for key, told in answered.items():
            self._hold(plain(key), written.get(key), told)
        return {**written, **{key: told.value for key, told in answered.items()}}

    def _hold(self, name: str, written: Any, told: Told) -> None:
        """Books where an answer is from, and what it denies."""
        if written is not None and not _agree(name, written, told.value):
            self._deny(name, written, told.value, told.where)
        self.origins[name] = told.where

    def _deny(self, name: str, written: Any, answered: Any, where: str) -> None:
        said_by = self.origins.get(name, self.written.source)
        found = Contradiction(name, str(written), str(answered), said_by, where)
        self.contradictions.append(found)

    # --- variables ------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        found = dict(self.written.environment)
        answered = self.answers.environment
        if answered is None:
            return found
        for name in VARIABLES:
            told, written = answered.get(name), found.get(name)
            if told is not None:
                self._hold(f"{ENV} {name}", written, told)
                found[name] = told.value
            elif written is not None:
                self._deny(f"{ENV} {name}", written, "unset", self.answers.url)
                del found[name]
        return found

    def _set_kvpatch(self, environment: dict[str, str]) -> bool:
        """Whether kvpatch is there, as metrics show it; returns whether it should be and is not."""
        shows = self.answers.shows_kvpatch
        hidden = settings.listed(environment.get(settings.DISABLE, ""))
        if shows is None or (not shows and "metrics" in hidden):
            return False
        asked = environment.get(settings.ENABLE)
        is_asked = asked is not None and asked.strip().lower() in ("1", "true")
        where = f"{self.answers.url}{METRICS}"
        if shows and self.path is not None and not is_asked:
            self._deny(f"{ENV} {settings.ENABLE}", asked or "unset", "true", where)
        environment[settings.ENABLE] = str(shows).lower()
        self.origins[f"{ENV} {settings.ENABLE}"] = where
        return is_asked and not shows

    # --- where it is, and what nobody says ------------------------------------------

    def _place(self, options: dict[str, Any]) -> None:
        """Its port, as far as a URL tells it: a file's may be behind another one."""
        address = urlsplit(self.answers.url)
        if options.get("port") is None:
            options["port"] = address.port or _PORTS[address.scheme]
            self.origins["port"] = self.answers.url

    def _assumed(self, options: Mapping[str, Any]) -> Iterator[str]:
        if self.path is None:
            yield from self.answers.silences
        else:
            for name, default in _DEFAULTS.items():
                if options.get(name) is None and not (
                    name == "enable_prefix_caching" and _NEGATED_CACHING in options
                ):
                    yield (
                        f"neither {self.path} nor {self.answers.url} says {plain(name)}: vLLM's "
                        f"own is taken ({default})"
                    )
        if self.answers.environment is None:
            known = "are those of its file" if self.path else "are taken for unset"
            yield f"it does not tell its variables, which {known}"
        elif self.answers.shows_kvpatch and self.path is None:
            yield (
                "it tells no variables of kvpatch's (KVPATCH_*) and of kvcached's, which are taken "
                "for unset"
            )
        if self.answers.shows_kvpatch is None and self.path is None:
            yield "nothing tells whether it has kvpatch, and it is taken for an engine without"


def _agree(name: str, written: Any, answered: Any) -> bool:
    """Whether an answer is what was written, or what vLLM makes of it."""
    if isinstance(answered, Mapping):
        asked = as_mapping(written, name)
        return all(_agree(key, value, answered.get(key)) for key, value in asked.items())
    words = [str(one).strip().lower() for one in (written, answered)]
    if name == "release":  # a build's own label changes nothing
        words = [word.partition("+")[0] for word in words]
    if name == "attention-backend":
        words = [word.removesuffix("_vllm_v1") for word in words]
    return words[0] == "auto" or _ONE_WORD.get(words[0], words[0]) == words[1]
