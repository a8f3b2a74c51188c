"""Makes kvpatch's log lines visible where nobody has set up logging for it."""

from __future__ import annotations

import logging
import sys

from kvpatch.core import settings


def set_up(logger: logging.Logger) -> None:
    """Gives `logger` the level asked for and, if no handler would see it, one of its own.

    vLLM configures its own logger only, so that the line which says what was
    patched would be dropped with the root logger's default level.
    """
    level = settings.log_level()
    if level is not None:
        logger.setLevel(level)
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
        logger.addHandler(handler)
