"""Prints, as JSON, the descriptions of several engines: vLLM is imported once.

usage: python -m tests.planning.describe_several COMMANDS.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvpatch.core.errors import Mistake
from kvpatch.tools.planning.describe import describe


def main(commands: Path) -> None:
    """One after the other; of what is refused, the sentence."""
    found, environment = [], dict(os.environ)
    for command in json.loads(commands.read_text(encoding="utf-8")):
        try:
            found.append(describe(**command))
        except Mistake as error:
            found.append({"refused": str(error)})
        os.environ.clear()  # vLLM sets variables of its own
        os.environ.update(environment)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
