"""The ``kvpatch`` command. Needs the extra ``cli``; ``verify`` needs ``serve`` as well."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpatch.doctor import Diagnosis

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Moves KV caches between unlike vLLM engines: byte-identical, or refused.",
)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what is installed, which generation this vLLM is, and what becomes of each patch.

    Exit status: 0 when everything that is enabled can be applied, 1 otherwise.
    """
    from rich.console import Console

    from kvpatch.core.errors import SettingsError
    from kvpatch.doctor import diagnose

    try:
        with Console(stderr=True).status("importing vLLM"):
            diagnosis = diagnose()
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        _show(diagnosis)
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _show(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    status = diagnosis.status
    installed = Table(title="kvpatch doctor", show_header=False)
    for name, version in diagnosis.versions.items():
        installed.add_row(name, version)
    installed.add_row("generation", status.generation or "unknown")
    installed.add_row("ENABLE_KVPATCH", "on" if diagnosis.gate else "off in this environment")
    for name, value in diagnosis.settings.items():
        installed.add_row(name, value)
    console.print(installed)
    styles = {"applied": "green", "refused": "red", "off": "yellow"}
    patches = Table("patch", "outcome", "why")
    for row in status.patches:
        patches.add_row(row.slug, row.outcome, row.reason, style=styles.get(row.outcome))
    console.print(patches)
    for problem in filter(None, (status.problem, diagnosis.connector)):
        console.print(f"refused: {problem}", markup=False, style="red", soft_wrap=True)


@app.command()
def verify(
    release: Annotated[
        str | None, typer.Option(help="vLLM release that must be installed.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name; by default a tiny random Llama.")
    ] = None,
    setups: Annotated[
        str, typer.Option(help="Which to run; the first is the reference.")
    ] = "single,stock,kvpatch",
    engine_args: Annotated[
        str, typer.Option(help="Server arguments of every engine, quoted as one.")
    ] = "",
    p_args: Annotated[str, typer.Option(help="Server arguments of the prefill engine.")] = "",
    d_args: Annotated[str, typer.Option(help="Server arguments of the decode engine.")] = "",
    kvpatch_on: Annotated[
        str, typer.Option(help="Sides with kvpatch: both, prefill or decode.")
    ] = "both",
    dtype: Annotated[str, typer.Option(help="Data type of model and cache.")] = "float32",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    negative_control: Annotated[
        bool, typer.Option(help="Also spoil a block on purpose; the comparison must notice.")
    ] = True,
    work_dir: Annotated[
        Path | None, typer.Option(help="For logs, model and results; kept.")
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds that an engine may take to start.")
    ] = 600.0,
) -> None:
    """Compare a prefill/decode pair with a single engine: greedy tokens and cache bytes.

    Exit status: 0 identical, 1 different, 2 could not run, 128 + n stopped by signal n.
    """
    from rich.console import Console

    from kvpatch.core.errors import Interrupted, KvpatchError
    from kvpatch.verify.report import errors as request_errors
    from kvpatch.verify.report import json_lines, summary, table, write_json_lines
    from kvpatch.verify.run import until_signal
    from kvpatch.verify.run import verify as run
    from kvpatch.verify.setups import (
        Options,
        parse_arguments,
        parse_setups,
        parse_side,
        require_release,
    )

    console, errors = Console(), Console(stderr=True)
    folder = (work_dir or Path(tempfile.mkdtemp(prefix="kvpatch-verify-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        options = Options(
            work_dir=folder,
            model=model,
            setups=parse_setups(setups),
            dtype=dtype,
            engine_arguments=parse_arguments(engine_args),
            prefill_arguments=parse_arguments(p_args),
            decode_arguments=parse_arguments(d_args),
            kvpatch_on=parse_side(kvpatch_on),
            max_tokens=max_tokens,
            negative_control=negative_control,
            startup_timeout_s=startup_timeout,
        )
        if release is not None:
            require_release(release)
        console.print(f"logs and results: {folder}", soft_wrap=True, highlight=False)
        result = until_signal(run(options, console))
    except Interrupted as stopped:
        errors.print(f"{stopped}; every engine has been stopped", soft_wrap=True)
        raise typer.Exit(128 + stopped.number) from None
    except KvpatchError as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    results = folder / "equivalence.jsonl"
    write_json_lines(results, json_lines(result.cases, result.observations, result.comparison))
    console.print(table(result.cases, result.comparison))
    if options.negative_control:
        console.print(table(result.cases, result.comparison, control=True))
    for line in (*request_errors(result.observations), *summary(result.comparison)):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    console.print(f"one JSON line per case: {results}", soft_wrap=True, highlight=False)
    if not result.comparison.passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
