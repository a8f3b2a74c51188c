"""The ``kvpatch`` command. Needs the extra ``cli``; ``verify`` needs ``serve`` as well."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kvpatch.core.errors import BadOptions, Interrupted, KvpatchError
from kvpatch.core.settings import SIDE_CHANNEL_KEY
from kvpatch.core.version import __version__
from kvpatch.tools.verify.engine import Options

if TYPE_CHECKING:
    from rich.console import Console

    from kvpatch.tools.doctor import Diagnosis
    from kvpatch.tools.engine_report import EngineReport
    from kvpatch.tools.planning.plan import PairPlan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvpatch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Moves KV caches between heterogeneous vLLM engines: byte-identical, or refused."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    url: Annotated[
        str | None,
        typer.Option(help="Say how the engine behind this API server is doing, by its metrics."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Say what another vLLM would get: a wheel, a checkout, site-packages."),
    ] = None,
) -> None:
    """Show what is installed, what becomes of each patch, and whether kvpatch works here.

    Exit status: 0 when an engine that is started here has every patch that is enabled, 1
    otherwise, 2 for wrong arguments. With --url: 0 when no load failed and nothing was
    refused, 1 otherwise, 2 when the engine does not answer. With --against: 0 when that vLLM
    gets every patch, 1 otherwise, 2 when there is no vLLM.
    """
    found: Diagnosis | EngineReport
    with exit_statuses():
        if url is not None:
            from kvpatch.tools.engine_report import report_of

            found = report_of(url)
        elif against is not None:
            from kvpatch.tools.doctor import upgrade_to

            found = upgrade_to(against)
        else:
            from kvpatch.tools.doctor import diagnose

            _announce_import()
            found = diagnose()
    _report(found, found.healthy, as_json)


def _announce_import() -> None:
    print("importing the installed vLLM, up to half a minute ...", file=sys.stderr, flush=True)


def _report(found: Diagnosis | EngineReport | PairPlan, is_well: bool, as_json: bool) -> None:
    """Prints what was found; ends the command with 0 where all is well, and with 1 otherwise."""
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        found.show(Console())
    raise typer.Exit(0 if is_well else 1)


def takes(options: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Gives a command an option for each field of a dataclass, and hands it the dataclass."""

    def with_options(command: Callable[[Any], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            command(options(**given))

        called.__doc__ = command.__doc__
        called.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
        called.__annotations__ = get_type_hints(options, include_extras=True)
        return called

    return with_options


@contextmanager
def exit_statuses() -> Iterator[None]:
    """Ends the command with 128 + n after signal n and with 2 where it could not run, and says why.

    Raises:
        SystemExit: in place of the errors.
    """
    try:
        yield
    except Interrupted as stopped:
        print(f"{stopped}; every engine has been stopped", file=sys.stderr)
        sys.exit(128 + stopped.number)
    except KvpatchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _require_extra(command: str, extra: str, *modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise BadOptions(
            f"kvpatch {command} needs {' and '.join(missing)}",
            f"run pip install 'kvpatch[{extra}]'",
        )


@app.command("plan")
def plan(
    prefill: Annotated[
        str,
        typer.Argument(
            help="P: a file of vllm serve --config, a description (.json), or an engine's URL.",
            show_default=False,
        ),
    ],
    decode: Annotated[str, typer.Argument(help="D's.", show_default=False)],
    release: Annotated[str | None, typer.Option(help="vLLM release of both.")] = None,
    platform: Annotated[str | None, typer.Option(help="Of both: cuda, rocm or cpu.")] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="Of both, as vLLM's log names it.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, or its folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what becomes of a pair of engines, from their arguments or descriptions.

    Exit status: 0 the pair serves as it is, 1 it does not, 2 nobody can say. Needs neither vLLM
    nor torch.
    """
    with exit_statuses():
        _require_extra("plan", "cli", "numpy", "yaml")
        from kvpatch.tools.planning.arguments import read_arguments
        from kvpatch.tools.planning.plan import plan_pair

        asked = {"release": release, "platform": platform, "attention-backend": attention_backend}
        p, d = (read_arguments(one, asked) for one in (prefill, decode))
        found = plan_pair(p, d, model_config)
    _report(found, found.serves, as_json)


@app.command("describe", context_settings={"ignore_unknown_options": True})
def describe(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Behind --: vllm serve and its arguments, variables first (NAME=value).",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask the engine behind this API server instead.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write it there, not to stdout.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="Of the engine, where it is not this machine's.")
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="That vLLM chooses there, as its log names it.")
    ] = None,
) -> None:
    """Ask the installed vLLM what an engine's caches will be, or a running engine what they are.

    The first needs no device and no weights, the second no vLLM.

    The JSON that it writes is what kvpatch plan takes for a side. Exit status: 0 written, 2 that
    cannot be said.
    """
    with exit_statuses():
        if url is None:
            from kvpatch.tools.planning.describe import describe as described

            _announce_import()
            found: Mapping[str, Any] = described(command or [], platform, attention_backend)
        elif command or platform or attention_backend:
            raise BadOptions("--url asks an engine that runs already", "leave out all but --output")
        else:
            from kvpatch.tools.planning.arguments import published_by

            found = published_by(url)
        text = json.dumps(found, indent=1)
        if output is None:
            typer.echo(text)
        else:
            output.write_text(f"{text}\n", encoding="utf-8")


@app.command("key")
def key(
    file: Annotated[Path, typer.Argument(help="A file that there is not yet.", show_default=False)],
) -> None:
    """Write a new side channel key, for KVPATCH_SIDE_CHANNEL_KEY of every engine.

    Its owner alone may read the file. Exit status: 0 written, 2 not.
    """
    with exit_statuses():
        try:
            import zmq
        except ImportError as error:
            raise BadOptions("pyzmq is not installed", "run this where vLLM is") from error
        _, secret = zmq.curve_keypair()
        try:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as opened:
                opened.write(f"{secret.decode()}\n")
        except OSError as error:
            raise BadOptions(f"{file} cannot be written: {error}", "name another one") from error
    typer.echo(f"Set {SIDE_CHANNEL_KEY}={file} for every engine, with a copy of this file.")


@app.command("verify")
@takes(Options)
def verify(asked: Options) -> None:
    """Compare a prefill/decode pair with a single engine: greedy tokens and cache bytes.

    With --device the caches of two workers are compared alone, in seconds: no engine, no model.
    Exit status: 0 identical, 1 different, 2 could not run, 128 + n stopped by signal n.
    """
    from rich.console import Console

    console = Console()
    with exit_statuses():
        is_passed = (_verify_engines if asked.device is None else _verify_workers)(asked, console)
    if not is_passed:
        raise typer.Exit(1)


def _verify_workers(asked: Options, console: Console) -> bool:
    _require_extra("verify", "cli", "numpy")
    if importlib.util.find_spec("torch") is None:
        raise BadOptions("torch is not installed", "run this where vLLM is")
    from kvpatch.tools.verify.workers import compare_workers, table_of

    found = compare_workers(str(asked.device))
    console.print(table_of(found, str(asked.device)))
    return all(one.is_right for one in found)


def _verify_engines(asked: Options, console: Console) -> bool:
    """Says what differs; the rest goes to a file."""
    _require_extra("verify", "serve", "httpx", "numpy")
    from kvpatch.tools.verify import compare, run

    console.print(f"logs and results: {asked.work_dir}", soft_wrap=True, highlight=False)
    found = run.until_signal(run.verify(asked, console))
    results = asked.work_dir / "equivalence.jsonl"
    compare.write_json_lines(results, compare.json_lines(found))
    for line in (*compare.sentences(found), f"one JSON line per case: {results}"):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    return found.passed


if __name__ == "__main__":
    app()
