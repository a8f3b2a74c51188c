"""Asks the API server of a running engine, with what Python brings along."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kvpatch.core.errors import LOOK_INTO_LOG, BadOptions, RequestFailed
from kvpatch.core.text import one_line

SCHEMES = ("http://", "https://")
METRICS = "/metrics"

_TIMEOUT_SECONDS = 10.0
#: More than the metrics of any engine; whoever answers without an end is no engine.
_MOST_BYTES = 64 * 1024**2
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPE = re.compile(r"\\.")


def text_of(url: str, path: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Returns what an API server answers to a GET, if that is no error.

    Raises:
        BadOptions: that is no URL.
        RequestFailed: it does not answer, or with an error.
    """
    if not url.startswith(SCHEMES):
        raise BadOptions(f"{url} is no URL of an API server", "give one like http://127.0.0.1:8000")
    address = f"{url.rstrip('/')}{path}"
    try:
        with urlopen(address, timeout=timeout_seconds) as response:
            body = response.read(_MOST_BYTES + 1)
            if len(body) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES} bytes came")
            return str(body.decode(errors="replace"))
    except HTTPError as error:
        error.close()
        raise RequestFailed(
            one_line(f"{address}: HTTP {error.code}: {error.reason}"), LOOK_INTO_LOG
        ) from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        why = error.reason if isinstance(error, URLError) else error
        raise RequestFailed(
            one_line(f"{address} does not answer: {why}"), "start the engine, or give its own URL"
        ) from error


def labels_of(text: str) -> dict[str, str]:
    """The labels of a sample in Prometheus' text, from between its braces."""
    return {
        name: _ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), value)
        for name, value in _LABEL.findall(text)
    }


def samples_of(text: str, name: str) -> Iterator[Mapping[str, str]]:
    """The labels of each sample of a metric in Prometheus' text."""
    sample = re.compile(rf"^{re.escape(name)}\{{(.*)\}} \S+$", re.MULTILINE)
    for labels in sample.findall(text):
        yield labels_of(labels)
