"""The options of a run, and which engines each of its set-ups is made of. Pure."""

from __future__ import annotations

import secrets
import shlex
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from kvpatch.core.errors import BadOptions
from kvpatch.core.installed import installed_vllm
from kvpatch.tools.verify.engine import EngineSpec

SETUPS = ("single", "stock", "kvpatch")
"""All set-ups, in the order in which they run; the first that is asked for is the reference."""


class PatchedSides(str, Enum):
    """The sides of a pair on which kvpatch is."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


def _new_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"kvpatch-verify-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Options:
    """The options of ``kvpatch verify``; ``*_args`` are of vLLM's API server."""

    work_dir: Annotated[
        Path,
        typer.Option(
            default_factory=_new_folder,
            show_default=False,
            resolve_path=True,
            help="For logs, model and results; kept.",
        ),
    ]
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda: compare two workers' caches there, without any engine."),
    ] = None
    release: Annotated[str | None, typer.Option(help="vLLM release that must be installed.")] = None
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name; by default a tiny random Llama.")
    ] = None
    setups: Annotated[str, typer.Option(help="Which to run; the first is the reference.")] = (
        ",".join(SETUPS)
    )
    engine_args: Annotated[
        str, typer.Option(help="Server arguments of every engine, quoted as one.")
    ] = ""
    p_args: Annotated[str, typer.Option(help="Server arguments of the prefill engine.")] = ""
    d_args: Annotated[str, typer.Option(help="Server arguments of the decode engine.")] = ""
    kvpatch_on: Annotated[PatchedSides, typer.Option(help="Sides with kvpatch.")] = (
        PatchedSides.BOTH
    )
    dtype: Annotated[str, typer.Option(help="Data type of model and cache.")] = "float32"
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24
    negative_control: Annotated[
        bool, typer.Option(help="Also spoil a block on purpose; the comparison must notice.")
    ] = True
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds that an engine may take to start.")
    ] = 600.0


@dataclass(frozen=True)
class Setup:
    """A single engine (no decode engine), or prefill engines and decode engines."""

    name: str
    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...] = ()

    @property
    def specs(self) -> tuple[EngineSpec, ...]:
        return (*self.prefill, *self.decode)


def require_release(expected: str | None) -> None:
    """Raise :class:`BadOptions` unless vLLM ``expected`` is what is installed here."""
    found = installed_vllm() if expected is not None else None
    if found is not None and Version(found.version).public != expected:
        raise BadOptions(
            f"--release: expected vLLM {expected}, found {found.distribution} {found.version} in "
            "this environment",
            "run it in one with that release, which experiments/equivalence.sh makes",
        )


def require_comparable(options: Options) -> None:
    """Raises :class:`BadOptions` for an unknown set-up, or for one alone."""
    asked = _names(options)
    if not asked <= set(SETUPS) or len(asked) < 2:
        reason = f"--setups is {options.setups!r}"
        raise BadOptions(reason, f"give two or more of {', '.join(SETUPS)}")


def _names(options: Options) -> set[str]:
    return {name.strip() for name in options.setups.split(",") if name.strip()}


def build_setups(options: Options, model: str) -> list[Setup]:
    """Returns the set-ups that are asked for, in the order of :data:`SETUPS`."""
    of_all, *of_sides = map(_split, (options.engine_args, options.p_args, options.d_args))

    def engine(name: str, arguments: tuple[str, ...], connector: bool, on: bool) -> EngineSpec:
        arguments = (*of_all, *arguments)
        return small_engine(name, model, options.dtype, arguments, connector, on)

    found = []
    for name in (name for name in SETUPS if name in _names(options)):
        if name == "single":
            found.append(Setup(name, (engine(name, (), False, False),)))
            continue
        prefill, decode = (
            engine(
                f"{name}-{side.value}",
                arguments,
                True,
                name == "kvpatch" and options.kvpatch_on in (PatchedSides.BOTH, side),
            )
            for side, arguments in zip(
                (PatchedSides.PREFILL, PatchedSides.DECODE), of_sides, strict=True
            )
        )
        found.append(Setup(name, (prefill,), (decode,)))
    return found


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadOptions(
            f"cannot split {text!r} into arguments: {error}", "write it as arguments of a shell"
        ) from None


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
