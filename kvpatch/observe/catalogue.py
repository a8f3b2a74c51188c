"""Every metric of kvpatch's, once: what ``/metrics`` shows is made of it, and so is the page.

No metric has more than one label, and no label more than a few values: classes of errors, ways,
outcomes, ranks, those layers of D's model that were the first of an alarm's. Nothing that a client
or a peer sends becomes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Way(str, Enum):
    """The path that bytes take from P into D's blocks."""

    STOCK = "stock"
    DIRECT = "direct"
    STAGED = "staged"
    HOST_BUFFER = "host_buffer"


class Outcome(str, Enum):
    """The outcome of a load: a request that a worker was to load."""

    RECEIVED = "received"
    FAILED = "failed"
    STALE = "stale"


class CheckResult(str, Enum):
    """The result of a check of a read, if there was one."""

    HELD = "held"  # P held the blocks to the last byte; of bytes: nothing is wrong with them
    UNPROVEN = "unproven"
    GONE = "gone"  # P says that it has let go of the blocks
    EXPIRED = "expired"  # P is not asked, and its lease was over before the last byte
    WRONG = "wrong"  # P held the blocks, and what was read is something else


class Proof(str, Enum):
    """The result of a load's digests; of two a later one is the load's."""

    CHECKED = "checked"
    PARTLY = "partly"
    UNCHECKED = "unchecked"
    ALARM = "alarm"


class Prompt(str, Enum):
    """The result of comparing a prompt that D would load with the one that P holds."""

    SAME = "same"
    PART = "part"
    UNSTATED = "unstated"
    REFUSED = "refused"
    AGAIN = "again"
    UNFILLED = "unfilled"


@dataclass(frozen=True)
class Metric:
    """A metric of kvpatch's.

    Attributes:
        name: the name in ``/metrics``; a counter's ends with ``_total`` there.
        label: the name of its label; empty for none.
        values: values of the label that are shown before anything was counted.
        is_of_scheduler: True if vLLM's scheduler is asked for it, which not every release does.
    """

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    label: str = ""
    values: tuple[str, ...] = ()
    is_of_scheduler: bool = False

    @property
    def shown_name(self) -> str:
        """Returns the name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


_WAYS = tuple(way.value for way in Way)
_RANK = "rank"
_LAYER = "layer"

READS = Metric(
    "kvpatch_reads",
    "counter",
    "Reads that are done, by way: one for each rank of P that a worker reads a request from.",
    "way",
    _WAYS,
)
READ_BYTES = Metric("kvpatch_read_bytes", "counter", "Bytes of these reads.", "way", _WAYS)
READ_SECONDS = Metric(
    "kvpatch_read_seconds",
    "counter",
    "Seconds of these reads, as NIXL counts them, or from the first post to the last byte.",
    "way",
    _WAYS,
)
LOADS = Metric(
    "kvpatch_loads",
    "counter",
    "Requests that a worker was to load, by outcome; stale: P let go of the blocks, or its lease "
    "was over.",
    "outcome",
    tuple(outcome.value for outcome in Outcome),
)
REFUSALS = Metric(
    "kvpatch_refusals",
    "counter",
    "What kvpatch refused at handshakes and of requests, by cause: the class of the error.",
    "cause",
    ("PeerRefused", "ReadRefused"),
)
PROMPTS = Metric(
    "kvpatch_prompts",
    "counter",
    "Prompts that D would load, by what P states of their tokens: all that both hold is the same, "
    "a part is, nothing is stated, or nothing and the prompt is computed for it; again: an earlier "
    "request carried the same answer of P, and nothing is loaded; unfilled: it is computed, since "
    "another connector would store a block that P's smaller ones fill in part.",
    "prompt",
    tuple(prompt.value for prompt in Prompt),
    is_of_scheduler=True,
)
HELD = Metric(
    "kvpatch_load_holds",
    "counter",
    "Loads that were received or stale, by whether P held their blocks to the last byte.",
    "hold",
    tuple(result.value for result in CheckResult if result is not CheckResult.WRONG),
)
DIGESTS = Metric(
    "kvpatch_load_digests",
    "counter",
    "Loads by what P's digest has said of them; none where digests are off.",
    "digest",
    tuple(proof.value for proof in Proof),
)
DIGEST_ALARMS = Metric(
    "kvpatch_digest_alarms",
    "counter",
    "Loads that are not what P had computed, by the model's first layer with a wrong byte.",
    _LAYER,
)
POOL_BYTES = Metric(
    "kvpatch_staging_pool_bytes",
    "gauge",
    "Size of a worker's staging pool, once it has met a heterogeneous peer.",
    _RANK,
)
POOL_USED_BYTES = Metric(
    "kvpatch_staging_pool_used_bytes",
    "gauge",
    "What chunks held of a worker's staging pool after its last step.",
    _RANK,
)
POOL_WAITING = Metric(
    "kvpatch_staging_pool_waiting_reads",
    "gauge",
    "Reads that could not begin for want of room in a worker's staging pool after its last step.",
    _RANK,
)
POOL_WAITS = Metric(
    "kvpatch_staging_pool_waits",
    "counter",
    "Reads that had to wait for room in a staging pool before they could begin.",
)
SAVED_BLOCKS = Metric(
    "kvpatch_host_buffer_saved_blocks", "counter", "Blocks that P has copied to its host buffer."
)
SAVE_SECONDS = Metric(
    "kvpatch_host_buffer_save_seconds", "counter", "Seconds that these copies took of P's steps."
)
HOST_BLOCKS = Metric(
    "kvpatch_host_buffer_blocks",
    "gauge",
    "Host blocks: all, those that requests have reserved, and of those the ones that are filled.",
    "state",
    ("all", "reserved", "filled"),
    is_of_scheduler=True,
)
HOST_WAITING = Metric(
    "kvpatch_host_buffer_waiting_requests",
    "gauge",
    "Requests that wait for room in P's host buffer.",
    is_of_scheduler=True,
)

DESCRIPTION = Metric(
    "kvpatch_description",
    "gauge",
    "The engine's description, which kvpatch describe --url reads: its caches, compatibility hash "
    "and settings; no address.",
    "packed",
)

METRICS = (
    *(READS, READ_BYTES, READ_SECONDS, LOADS, REFUSALS, PROMPTS, HELD, DIGESTS),
    *(DIGEST_ALARMS, POOL_BYTES, POOL_USED_BYTES, POOL_WAITING, POOL_WAITS),
    *(SAVED_BLOCKS, SAVE_SECONDS, HOST_BLOCKS, HOST_WAITING, DESCRIPTION),
)
