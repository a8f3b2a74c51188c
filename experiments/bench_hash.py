"""How long D looks for what differs in a P's compatibility hash, and what it takes of the engine.

    python experiments/bench_hash.py [--release 0.33.0]

Beside the search a thread sleeps and wakes every millisecond, as an engine's does between its
steps: how late it wakes is what the search costs the engine. Nothing of vLLM is needed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvpatch.connector.handshake.peer_hash.explanation import Search
from kvpatch.connector.handshake.peer_hash.factors import OwnFactors, digest_of
from kvpatch.core.releases import FACTS, RELEASES

_TICK_SECONDS = 0.001
_RUNS = 9
_ENGINE: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-70B-Instruct",
    "dtype": "torch.bfloat16",
    "num_kv_heads": 8,
    "head_size": 128,
    "num_hidden_layers": 80,
    "attn_backend_name": "FLASH_ATTN",
    "cache_dtype": "auto",
    "cross_layers_blocks": False,
    "is_hma_enabled": True,
    "speculative_config": None,
    "transfer_mode": "pull",
}


def main() -> None:
    """Prints a line for each peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[-1])
    release = parser.parse_args().release
    own = _own(release)
    others = [name for name, facts in FACTS.items() if facts.states_hash and name != release]
    peers = {
        "another attention backend": _stated(release, attn_backend_name="FLASHINFER"),
        "the nearest release": _stated(others[-1]),
        "the oldest release, another backend": _stated(others[0], attn_backend_name="FLASHINFER"),
        "another model: all is tried": _stated(release, model="another"),
    }
    print("nothing: a thread that wakes every millisecond")
    _print(lambda: time.sleep(0.3))
    for name, stated in peers.items():
        print(name)
        _print(partial(_search, own, stated))


def _search(own: OwnFactors, stated: str) -> None:
    Search(own, stated).go_on()


def _own(release: str, **changes: Any) -> OwnFactors:
    facts = FACTS[release]
    versions = {"vllm_version": release, "nixl_connector_version": facts.connector_version}
    return OwnFactors(facts, {**_ENGINE, **versions, **changes})


def _stated(release: str, **changes: Any) -> str:
    own = _own(release, **changes)
    return digest_of({name: own.values[name] for name in own.facts.hash_factors})


def _print(search: Callable[[], Any]) -> None:
    seconds, late = [], []
    for _ in range(_RUNS):
        with _Ticks() as ticks:
            start = time.perf_counter()
            search()
            seconds.append(time.perf_counter() - start)
        late += ticks.late
    worst = sorted(late)[int(0.99 * len(late))]
    print(
        f"    {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}); "
        f"woken late by {statistics.median(late) * 1e3:.2f} ms, 99th percentile "
        f"{worst * 1e3:.2f} ms, at most {max(late) * 1e3:.2f} ms"
    )


class _Ticks:
    """A thread that wakes every millisecond, and how late it was each time, in seconds."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def __enter__(self) -> _Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._is_over.is_set():
            due = time.perf_counter() + _TICK_SECONDS
            time.sleep(_TICK_SECONDS)
            self.late.append(time.perf_counter() - due)


if __name__ == "__main__":
    main()
