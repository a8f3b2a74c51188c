"""What the parent and an engine process tell each other; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .case import EngineSpec


@dataclass(frozen=True)
class Start:
    """What the parent chooses for an engine."""

    spec: EngineSpec
    engine_id: str
    #: First of as many consecutive ports as the engine has ranks.
    side_channel_port: int
    seed: int
    extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fork:
    """Asks for an engine process."""

    log_path: str
    patched: bool
    patches: tuple[str, ...]
    #: kvpatch's variables, as (name, value).
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Failure:
    """An exception in an engine process, as data."""

    where: str
    kind: str
    message: str
    trace: str
    #: Raised by the lab's own code rather than under a call into the release.
    by_lab: bool
