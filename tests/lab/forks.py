"""How a forked process of the lab begins and ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def write_to(log: str) -> None:
    """Has all that this process prints written to a file."""
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


def run_as_fork(serve: Callable[[], None]) -> NoReturn:
    """Does what the fork is there for: it must never return into its parent's stack."""
    status = 1
    try:
        serve()
        status = 0
    except EOFError:  # whom it serves has gone
        status = 0
    except BaseException:  # noqa: BLE001 - it ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
