"""Reads descriptions of engines, from files and from running engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from kvpatch.core.errors import SEND_ONE, BadOptions
from kvpatch.core.text import shown
from kvpatch.observe import catalogue
from kvpatch.peer.engine_description import KINDS, LATENT, NUMBER, SCHEMA, Caches, Layer, unpacked
from kvpatch.tools.engine_report import METRICS, SCHEMES, samples_of, text_of

#: The metric of a running engine that has it.
DESCRIPTION = catalogue.DESCRIPTION.shown_name
#: The cure where it is not there.
NO_DESCRIPTION = (
    "give it ENABLE_KVPATCH=true, vLLM >= 0.29, caches that plan knows and a request to answer, or "
    "use kvpatch describe -- vllm serve MODEL"
)


def check(caches: Caches, source: str) -> None:
    """Raises :class:`BadOptions` for caches that a plan does not know."""
    kinds = {one.kind for one in caches.layers}
    shapes = {
        (one.kind == LATENT, one.kv_heads, one.head_dim, one.value_dim, one.dtypes)
        for one in caches.attention.values()
    }
    blocks = {one.block_tokens for one in caches.layers}
    backends = {one.backend for one in caches.attention.values()}
    states = {one.parts for one in caches.states.values()}
    found = ""
    if kinds - KINDS or not shapes:
        found = f"caches of {', '.join(sorted(kinds))}"
    elif len(shapes) > 1 or caches.first.value_dim not in (0, caches.first.head_dim):
        found = "layers whose caches have several shapes"
    elif len(blocks) > 1 or len(backends) > 1:
        found = "layers with blocks of several sizes, or with several attention backends"
    elif len(states) > 1 or () in states:
        found = "these recurrent states"
    if found:
        raise BadOptions(f"{source}: not planned for: {found}", SEND_ONE)


@dataclass(frozen=True)
class Description:
    """The answers of vLLM on one engine: its version and factors are those that it hashes."""

    version: str
    caches: Caches
    factors: Mapping[str, Any] | None = None


def read_json(source: str) -> Mapping[str, Any] | None:
    """Returns the description that a file or a running engine has; None of any other file."""
    if source.startswith(SCHEMES):
        content: Any = published_by(source)
    else:
        try:
            path = Path(source)
            content = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            return None  # the reader of arguments says what is wrong
    if not isinstance(content, Mapping) or SCHEMA not in content:
        return None
    if content[SCHEMA] != NUMBER:
        reason = f"{source} is a description of schema {content[SCHEMA]!r}, and not of {NUMBER}"
        raise BadOptions(reason, "write it anew, with one kvpatch")
    return content


def published_by(url: str) -> Mapping[str, Any]:
    """Returns the description in the metrics of a running engine.

    Raises:
        BadOptions: that is no URL, or it has none.
        RequestFailed: it does not answer.
    """
    samples = samples_of(text_of(url, METRICS))
    found = {labels.get("packed", "") for name, labels, _ in samples if name == DESCRIPTION}
    if not found:
        raise BadOptions(f"{url} has no description in its metrics", NO_DESCRIPTION)
    if len(found) > 1:
        raise BadOptions(f"{url} has engines of several descriptions", "give the URL of one engine")
    try:
        return unpacked(found.pop())
    except ValueError as error:
        reason = f"{url} has a description that cannot be read: {error}"
        raise BadOptions(reason, "use one kvpatch for both") from None


def description_in(content: Mapping[str, Any], source: str) -> Description:
    """Reads the caches and the factors of a description."""
    try:
        found, hashed = _as_tuples(content["caches"]), content["hash"]
        layers = tuple(Layer(**one) for one in found["layers"])
        caches = Caches(**{**found, "layers": layers})
        factors = None if hashed is None else dict(hashed["factors"])
        _check_types(caches)
        check(caches, source)
        return Description(str(content["vllm"]), caches, factors)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{source} is no whole description ({error!r:.100})"
        raise BadOptions(reason, "write it anew, and leave it as is") from None


def _check_types(caches: Caches) -> None:
    """Raises ValueError or KeyError for a field of another type, and for a layer in no group."""
    for each in (caches, *caches.layers):
        for name, kind in get_type_hints(type(each)).items():
            if not _is_of(getattr(each, name), kind):
                raise ValueError(f"{name} is {shown(getattr(each, name))}")
    grouped = {number for group in caches.numbered_groups for number in group}
    if len(grouped) < len(caches.layers) or not all(one.dtypes for one in caches.layers):
        raise ValueError("layers without a group or a data type")


def _is_of(value: Any, kind: Any) -> bool:
    """True if a value has a field's type, tuples included; numbers count something."""
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value) if isinstance(value, tuple) else ()
        is_whole = isinstance(value, tuple) and len(value) == len(kinds)
        return is_whole and all(map(_is_of, value, kinds))
    return type(value) is kind and (kind is not int or value >= 0)


def _as_tuples(found: Any) -> Any:
    """Turns the lists of JSON into tuples."""
    if isinstance(found, dict):
        return {name: _as_tuples(one) for name, one in found.items()}
    return tuple(map(_as_tuples, found)) if isinstance(found, list) else found
