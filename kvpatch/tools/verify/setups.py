"""The set-ups of a run: which engines each is made of. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.version import Version

from kvpatch.core.errors import BadOptions
from kvpatch.core.installed import installed_vllm
from kvpatch.tools.verify.engine import EngineSpec

SETUPS = ("single", "stock", "kvpatch")
"""All set-ups, in the order in which they run; the first that is asked for is the reference."""

Side = Literal["both", "prefill", "decode"]
SIDES: tuple[Side, ...] = ("both", "prefill", "decode")


@dataclass(frozen=True)
class Options:
    """The options of a run. ``*_arguments`` are of vLLM's API server.

    Attributes:
        model: a folder or a hub name; None for the tiny random model.
        setups: which of :data:`SETUPS` to run.
        engine_arguments: for every engine; ``prefill_`` and ``decode_arguments`` come after them.
        kvpatch_on: the sides on which the set-up ``kvpatch`` turns it on.
        max_tokens: length of each answer in tokens.
    """

    work_dir: Path
    model: str | None = None
    setups: tuple[str, ...] = SETUPS
    dtype: str = "float32"
    engine_arguments: tuple[str, ...] = ()
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    kvpatch_on: Side = "both"
    max_tokens: int = 24
    negative_control: bool = True
    startup_timeout_s: float = 600.0


@dataclass(frozen=True)
class Setup:
    """A single engine (no decode engine), or prefill engines and decode engines."""

    name: str
    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...] = ()

    @property
    def specs(self) -> tuple[EngineSpec, ...]:
        return (*self.prefill, *self.decode)


def route(case: int, prefill: int, decode: int) -> tuple[int, int | None]:
    """The numbers of the prefill and the decode engine that serve a case.

    Neighbours go to different prefill engines and, until each has had one, to one decode engine,
    so that prompts with a shared prefix meet there.
    """
    return case % prefill, case // prefill % decode if decode else None


def parse_setups(text: str) -> tuple[str, ...]:
    """``"single,kvpatch"`` -> the names in the order of :data:`SETUPS`.

    Raises:
        BadOptions: an unknown name, or fewer than two: one set-up has nothing to be held against.
    """
    asked = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(asked - set(SETUPS))
    if unknown or len(asked) < 2:
        raise BadOptions(f"--setups is {text!r}", f"give two or more of {', '.join(SETUPS)}")
    return tuple(name for name in SETUPS if name in asked)


def parse_side(text: str) -> Side:
    for side in SIDES:
        if text == side:
            return side
    raise BadOptions(f"--kvpatch-on is {text!r}", f"give one of {', '.join(SIDES)}")


def require_release(expected: str) -> None:
    """Raise :class:`BadOptions` unless vLLM ``expected`` is what is installed here."""
    found = installed_vllm()
    if Version(found.version).public != expected:
        raise BadOptions(
            f"--release: expected vLLM {expected}, found {found.distribution} {found.version} in "
            "this environment",
            "run it in one with that release, which experiments/equivalence.sh makes",
        )


def parse_arguments(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadOptions(
            f"cannot split {text!r} into arguments: {error}", "write it as arguments of a shell"
        ) from None


def build_setups(options: Options, model: str) -> list[Setup]:
    def spec(name: str, arguments: tuple[str, ...], connector: bool, kvpatch: bool) -> EngineSpec:
        arguments = (*options.engine_arguments, *arguments)
        return small_engine(name, model, options.dtype, arguments, connector, kvpatch)

    setups = []
    for name in options.setups:
        if name == "single":
            setups.append(Setup(name, (spec("single", (), connector=False, kvpatch=False),)))
            continue
        on = {
            side: name == "kvpatch" and options.kvpatch_on in ("both", side)
            for side in ("prefill", "decode")
        }
        prefill = spec(f"{name}-prefill", options.prefill_arguments, True, on["prefill"])
        decode = spec(f"{name}-decode", options.decode_arguments, True, on["decode"])
        setups.append(Setup(name, (prefill,), (decode,)))
    return setups


def small_engine(
    name: str,
    model: str,
    dtype: str,
    arguments: tuple[str, ...],
    connector: bool,
    kvpatch: bool,
    environment: tuple[tuple[str, str], ...] = (),
) -> EngineSpec:
    """An engine that several of can share a small machine; ``arguments`` override its own."""
    small = (
        *("--dtype", dtype, "--block-size", "32", "--max-model-len", "1024"),
        *("--max-num-seqs", "8", "--enforce-eager"),
    )
    return EngineSpec(name, model, (*small, *arguments), connector, kvpatch, environment)
