"""``kvpatch`` and ``python -m kvpatch``: the command, or a sentence where its extra is missing."""

from __future__ import annotations

import sys

from kvpatch.core.version import __version__


def main() -> None:
    """Runs the command; its version is shown without the extra, too."""
    try:
        from kvpatch.tools.cli import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        if sys.argv[1:] == ["--version"]:
            print(f"kvpatch {__version__}")
            return
        print("error: the command needs typer: pip install 'kvpatch[cli]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="kvpatch")


if __name__ == "__main__":
    main()
