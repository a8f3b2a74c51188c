"""Measures a load between unlike engines on a network, beside the load of a like pair.

    python experiments/bench_link.py [--mib 64] [--repeat 3] [--rates 1,2,5] [--json FILE]

P and D are two processes in two network namespaces, with a pair of interfaces between them (veth).
`tc` limits both ends to some Gbit/s, and adds a delay where the kernel has netem. NIXL reads by UCX
over TCP, and by nothing else. "like" is stock's read between two engines like P, and every other
time is over that of the same turn: what a fleet sees where the network is what limits it. Bytes are
compared before anything is timed. Where there are no namespaces the exit status is 0, with the
reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from bench_transfer import GQA, PAIRS, THREADS, Pair, Setup, Way
from harness import Goal, Published, conclude, console_of, options_of, seconds_of
from rich.console import Console

from kvpatch.tools.verify.workers import WorkerMemory, hold_prefill
from tests.lab.namespaces import (
    NAMESPACE,
    NoNamespaces,
    enter,
    enter_as_told,
    in_thread,
    own_network,
)

_LINKED = (PAIRS[0], PAIRS[1], Pair(GQA, "LBNHC", 64, "LBHNC", 64))
_DELAYS_MS = (0, 2, 10)
_ENDS = (("kvlink0", "10.204.0.1"), ("kvlink1", "10.204.0.2"))
#: Runs of a token and head, 256 bytes: over TCP each costs as much as a kilobyte.
_FEW_RUNS = "HNC"


@dataclass
class Measured:
    """One pair on one link; seconds are medians."""

    pair: str
    gbit_per_second: float
    delay_ms: float
    way: str
    seconds: float
    of_like: float


class Link:
    """The two namespaces of this process, and the interfaces between them."""

    def __init__(self) -> None:
        self.spaces = [in_thread(own_network) for _ in _ENDS]
        self._paths = [f"/proc/{os.getpid()}/fd/{space}" for space in self.spaces]
        (first, _), (second, _) = _ENDS
        self._run(0, f"ip link add {first} type veth peer name {second}")
        self._run(0, f"ip link set {second} netns {self._paths[1]}")
        for end, (name, host) in enumerate(_ENDS):
            self._run(end, f"ip address add {host}/24 dev {name}")
            self._run(end, f"ip link set {name} mtu 9000 up")
            self._run(end, "ip link set lo up")

    def settings(self, end: int) -> dict[str, str]:
        """Returns the variables of a process at an end."""
        device = _ENDS[end][0]
        return {NAMESPACE: self._paths[end], "UCX_TLS": "self,tcp", "UCX_NET_DEVICES": device}

    def shape(self, gbit: float, delay_ms: float) -> None:
        """Limits both ends.

        Raises:
            NoNamespaces: the kernel has no netem, which delays.
        """
        burst = int(max(256_000, gbit * 1e9 / 8 / 1000))  # a millisecond of it
        limits = f"tbf rate {gbit}gbit burst {burst} latency 50ms"
        if delay_ms:
            limits = f"netem delay {delay_ms}ms rate {gbit}gbit limit 100000"
        for end, (name, _) in enumerate(_ENDS):
            try:
                self._run(end, f"tc qdisc replace dev {name} root {limits}")
            except subprocess.CalledProcessError as error:
                raise NoNamespaces(error.stderr.decode().strip().replace("\n", " ")) from error

    def _run(self, end: int, command: str) -> None:
        def run() -> None:
            enter(self._paths[end])  # this thread alone
            subprocess.run(command.split(), check=True, capture_output=True)

        in_thread(run)


def _prefill(settings: dict[str, str], connection: Connection, size: int) -> None:
    os.environ.update(settings)
    enter_as_told(os.environ)
    hold_prefill(connection, "cpu", size, THREADS)


def _decode(
    settings: dict[str, str], prefill: Connection, orders: Connection, size: int, mib: int
) -> None:
    """Measures in D's process, each time that it is told to."""
    os.environ.update(settings)
    enter_as_told(os.environ)
    decode = WorkerMemory("D", "cpu", size, 2, THREADS)
    decode.meet(prefill)
    setups = [Setup(pair, pair.tokens_in(mib * 1024**2), decode) for pair in _LINKED]
    is_first = True
    while repeat := orders.recv():
        found = []
        for setup in setups:
            ways = _ways(setup)
            if is_first:
                setup.check(ways)
            turns = [{way: seconds_of(run) for way, run in ways.items()} for _ in range(repeat)]
            for way in ways:
                ratio = statistics.median(turn[way] / turn["like"] for turn in turns)
                found.append((str(setup.pair), way, [turn[way] for turn in turns], ratio))
        is_first = False
        orders.send(found)
    os._exit(0)  # P's process waits for nothing any more


def _ways(setup: Setup) -> dict[str, Way]:
    ways: dict[str, Way] = {"like": setup.like(setup.pair.remote_tokens)}
    if setup.pair.remote_layout[-3:] == _FEW_RUNS:
        ways["direct"] = partial(setup.in_thread, is_direct=True)
    ways["staged"] = partial(setup.in_thread, is_direct=False)
    return ways


@contextmanager
def linked() -> Iterator[Link]:
    """Yields a link.

    Raises:
        NoNamespaces: it is not to be had here.
    """
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise NoNamespaces(f"there is no command {missing[0]} (iproute2)")
    try:
        link = Link()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNamespaces(f"network namespaces and veth are not to be had: {error}") from error
    try:
        yield link
    finally:
        for space in link.spaces:  # they go with their last process
            os.close(space)


def measure(link: Link, options: argparse.Namespace, console: Console) -> list[Measured]:
    """Measures all rates and delays that the kernel has."""
    context = multiprocessing.get_context("spawn")
    (prefill, of_decode), (orders, of_orders) = context.Pipe(), context.Pipe()
    size = 2 * options.mib * 1024**2
    arguments = (link.settings(0), prefill, size)
    link.shape(10, 0)
    p = context.Process(target=_prefill, args=arguments, daemon=True)
    more = (link.settings(1), of_decode, of_orders, size, options.mib)
    d = context.Process(target=_decode, args=more, daemon=True)
    p.start()
    d.start()
    of_orders.close()
    rows = []
    for delay_ms in _DELAYS_MS:
        for gbit in map(float, options.rates.split(",")):
            try:
                link.shape(gbit, delay_ms)
            except NoNamespaces as error:
                console.print(f"{delay_ms} ms at {gbit:g} Gbit/s: skipped, {error}", markup=False)
                break
            orders.send(options.repeat)
            rows += [
                Measured(pair, gbit, delay_ms, way, statistics.median(seconds), of_like)
                for pair, way, seconds, of_like in orders.recv()
            ]
    orders.send(0)
    d.join()
    p.kill()
    return rows


def table(rows: list[Measured], mib: int) -> Published:
    columns = ("P → D", "way", "Gbit/s", "delay, ms", "ms", "Gbit/s seen", "of the like load")
    shown = [
        [
            row.pair, row.way, f"{row.gbit_per_second:g}", f"{row.delay_ms:g}",
            f"{row.seconds * 1e3:.0f}", f"{mib * 2**20 * 8 / row.seconds / 1e9:.2f}",
            f"{row.of_like:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return Published("link", "experiments/bench_link.py", "", columns, shown)


def goals(rows: list[Measured]) -> list[Goal]:
    """Judges the faster way of each pair, on each link."""
    best: dict[str, float] = {}
    for row in rows:
        if row.way != "like":
            name = f"{row.pair}, {row.gbit_per_second:g} Gbit/s, {row.delay_ms:g} ms"
            best[name] = min(row.of_like, best.get(name, row.of_like))
    return [Goal(name, ratio, 1.05) for name, ratio in best.items()]


def main() -> None:
    options = options_of(
        __doc__,
        mib=(64, "size of the request's cache"),
        repeat=(3, "turns of each row"),
        rates=("1,2,5", "Gbit/s, by commas"),
    )
    console = console_of(120)
    try:
        with linked() as link:
            rows = measure(link, options, console)
    except NoNamespaces as error:
        console.print(f"skipped: {error}", markup=False)
        sys.exit(0)
    conclude(rows, goals(rows), options, console, table(rows, options.mib))


if __name__ == "__main__":
    main()
