"""What the parent and an engine process tell each other; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .case import EngineSpec

#: The variable with the folder of the engines' models.
MODELS = "LAB_MODELS"


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
    #: A load that failed alone, or an engine that the release or kvpatch did not let start;
    #: any other exception ends an engine, or is the lab's own.
    is_refusal: bool


@dataclass(frozen=True)
class Prompt:
    """A request of a stage, the same on every engine that it visits."""

    name: str
    #: Of all prompts of the stage: what its cache holds follows from it.
    number: int
    tokens: int
    #: Positions at which another token stands than in other prompts of this number. What a cache
    #: holds of it and of all tokens behind it follows from it, too.
    edits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ask:
    """A prompt, and what the proxy carries of it from P to D, as JSON."""

    prompt: Prompt
    answer: str


@dataclass(frozen=True)
class Served:
    """A prompt that D's scheduler has served, from when it came to its last answered token.

    Attributes:
        status: what has become of it, by the name of vLLM's status.
        computed: tokens of the prompt that the model computed.
        answer: the parameters that it was answered with, as JSON.
    """

    status: str
    computed: int
    answer: str


@dataclass(frozen=True)
class Checked:
    """How far a cache is from what it should hold, and what came there how (see `case.Report`).

    Attributes:
        stray: bytes written outside the requests' own blocks.
        noticed: wrong elements once it was spoilt, by the way to do that (negative controls).
    """

    wrong: int
    total: int
    stray: int
    descriptors: int
    registrations: int
    prepared: int
    noticed: dict[str, int]


@dataclass(frozen=True)
class Seen:
    """What D's worker has reported of some requests so far."""

    received: frozenset[str]
    #: Requests with blocks that could not be loaded.
    failed: frozenset[str]
    waiting: frozenset[str]
    #: What the release has logged as errors.
    logged: tuple[str, ...]
    #: What D was doing when the time was over.
    standstill: str = field(default="", repr=False)


@dataclass(frozen=True)
class Timed:
    """One read, from the step that posts it to the step that reports it.

    Attributes:
        descriptors: in the transfers that it took.
    """

    seconds: float
    descriptors: int


@dataclass(frozen=True)
class Told:
    """What an API server shows in ``/metrics`` of the connector, and logs of it."""

    shown: dict[str, float]
    logged: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """What a worker holds of transfers, over all ranks."""

    transfers: frozenset[str] = frozenset()
    metadata: frozenset[str] = frozenset()
    #: NIXL's transfer handles that are not released.
    handles: int = 0
    #: Of kvpatch's staging pool.
    staging_bytes: int = 0
    #: Whether kvpatch thinks that a request is being posted.
    is_reading: bool = False
