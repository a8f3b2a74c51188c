"""Prints the descriptions of the commands on stdin, as JSON: vLLM is imported once."""

from __future__ import annotations

import json
import os
import sys

from kvpatch.core.errors import Mistake
from kvpatch.tools.planning.describe import describe


def main() -> None:
    """Describes one after the other; of what is refused it prints the sentence."""
    found, environment = [], dict(os.environ)
    for command in json.load(sys.stdin):
        try:
            found.append(describe(**command))
        except Mistake as error:
            found.append({"refused": str(error)})
        os.environ.clear()  # vLLM sets variables of its own
        os.environ.update(environment)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
