"""Asks the API server of a running engine, with what Python brings along."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, IncompleteRead
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kvpatch.core.errors import LOOK_INTO_LOG, BadOptions, RequestFailed
from kvpatch.core.text import one_line

SCHEMES = ("http://", "https://")
METRICS = "/metrics"
OK = 200

_TIMEOUT_SECONDS = 10.0
#: More than the metrics of any engine; whoever answers without an end is no engine.
_MOST_BYTES = 64 * 1024**2
_CHUNK_BYTES = 1 << 16
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPE = re.compile(r"\\.")


@dataclass(frozen=True)
class Answer:
    """The answer to one GET.

    Attributes:
        address: what was asked.
        status: of HTTP.
    """

    address: str
    status: int
    text: str

    @property
    def is_ok(self) -> bool:
        """True if it is what was asked for."""
        return self.status == OK


def answer_of(url: str, path: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> Answer:
    """Returns what an API server answers to a GET, whatever its status.

    Args:
        timeout_seconds: that the whole answer may take.

    Raises:
        BadOptions: that is no URL.
        RequestFailed: nobody answers there, or too slowly, or without an end.
    """
    if not url.startswith(SCHEMES):
        raise BadOptions(f"{url} is no URL of an API server", "give one like http://127.0.0.1:8000")
    address = f"{url.rstrip('/')}{path}"
    deadline = time.monotonic() + timeout_seconds
    try:
        with urlopen(address, timeout=timeout_seconds) as response:
            return Answer(address, response.status, _text(response, deadline))
    except HTTPError as error:
        error.close()
        return Answer(address, error.code, str(error.reason))
    except (URLError, HTTPException, OSError, ValueError) as error:
        why = error.reason if isinstance(error, URLError) else error
        raise RequestFailed(
            one_line(f"{address} does not answer: {why}"), "start the engine, or give its own URL"
        ) from error


def text_of(url: str, path: str) -> str:
    """Returns what an API server answers to a GET, if that is no error.

    Raises:
        BadOptions: that is no URL.
        RequestFailed: it does not answer, or with an error.
    """
    found = answer_of(url, path)
    if not found.is_ok:
        raise RequestFailed(
            one_line(f"{found.address}: HTTP {found.status}: {found.text}"), LOOK_INTO_LOG
        )
    return found.text


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


def _text(response: HTTPResponse, deadline: float) -> str:
    """The body of a response.

    Raises:
        TimeoutError: it does not end in time.
        ValueError: it does not end.
        IncompleteRead: it ends too early.
    """
    found = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        found += chunk
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        if len(found) > _MOST_BYTES:
            raise ValueError(f"its answer has more than {_MOST_BYTES} bytes")
    if response.length:
        raise IncompleteRead(bytes(found), response.length)
    return found.decode(errors="replace")
