"""The pairs of engines of the proofs, and what is on in them. Pure.

Every engine of a pair has the probe of the proofs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvpatch.verify.engine import TRANSFER_CONFIG, EngineSpec
from kvpatch.verify.setups import small_engine

CACHE_TOKENS = 65536
"""Of each engine."""

PROOF_PROBE = ("--worker-extension-cls", "experiments.engines.proof_probe.ProofProbe")
ONE_PROCESS = ("--distributed-executor-backend", "uni")
"""For one rank, as vLLM has it on a GPU; a process less that has to start."""

_TOGETHER = 16


@dataclass(frozen=True)
class Pair:
    """Tokens of the blocks of P and of D, and P's ranks."""

    name: str
    prefill_tokens: int
    decode_tokens: int
    prefill_ranks: int = 1

    @property
    def is_like(self) -> bool:
        """Whether D without kvpatch reads it rightly."""
        return self.prefill_tokens == self.decode_tokens and self.prefill_ranks == 1


PAIRS = (
    Pair("64 to 64", 64, 64),
    Pair("128 to 32", 128, 32),
    Pair("TP2 to TP1", 32, 128, prefill_ranks=2),
)


@dataclass(frozen=True)
class Setting:
    """What is on in a pair.

    Attributes:
        at_p: whether P has kvpatch.
        at_d: whether D has.
        takes_back: whether D's steps wait for the witness's word, as ``enforce`` needs it.
        lease_s: of P's; of loads that fail P is not told, and keeps their blocks for as long.
    """

    name: str
    at_p: bool
    digest: str = "off"
    witness: str = "off"
    policy: str = "fail"
    takes_back: bool = False
    at_d: bool = True
    lease_s: int = 300


NOTHING = Setting("stock", False, at_d=False)
COSTS = (
    Setting("stock again", False, at_d=False),
    Setting("holds", True),
    Setting("holds and witness", True, witness="log"),
    Setting("holds and digests", True, digest="all"),
)
"""What is timed beside :data:`NOTHING`; the first shows what the measurement cannot tell from 1."""

BOTH = Setting(
    "both", True, digest="all", witness="enforce", policy="recompute", takes_back=True, lease_s=30
)


@dataclass(frozen=True)
class Played:
    """A pair with a model in a data type."""

    pair: Pair
    setting: Setting
    model: str
    dtype: str

    def prefill(self) -> EngineSpec:
        """P."""
        pair = self.pair
        ranks = ("--tensor-parallel-size", "2") if pair.prefill_ranks > 1 else ONE_PROCESS
        return self._engine("prefill", pair.prefill_tokens, self.setting.at_p, ranks)

    def decode(self) -> EngineSpec:
        """D."""
        waits = ("--no-async-scheduling",) if self.setting.takes_back else ()
        more = (*waits, *ONE_PROCESS)
        return self._engine("decode", self.pair.decode_tokens, self.setting.at_d, more)

    def _engine(
        self, side: str, block_tokens: int, is_on: bool, more: tuple[str, ...]
    ) -> EngineSpec:
        setting = self.setting
        config = {
            **TRANSFER_CONFIG,
            "kv_load_failure_policy": setting.policy,
            "kv_connector_extra_config": {"kv_lease_duration": setting.lease_s},
        }
        arguments = (
            *PROOF_PROBE,
            *("--block-size", str(block_tokens), "--max-num-seqs", str(_TOGETHER)),
            *("--num-gpu-blocks-override", str(CACHE_TOKENS // block_tokens)),
            *("--kv-transfer-config", json.dumps(config), *more),
        )
        environment: dict[str, str] = {}
        if is_on:
            environment |= {"KVPATCH_DIGEST": setting.digest, "KVPATCH_WITNESS": setting.witness}
            environment["KVPATCH_ON_FAILED_CHECK"] = setting.policy  # a bad load is told by it
        if setting.takes_back:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        words = (self.pair.name, setting.name, setting.policy, self.dtype, side)
        name = "-".join(words).replace(" ", "-").lower()
        return small_engine(
            name, self.model, self.dtype, arguments, True, is_on, tuple(environment.items())
        )


def single(model: str, dtype: str) -> EngineSpec:
    """The engine that computes alone."""
    arguments = (
        *("--max-num-seqs", str(_TOGETHER)),
        *("--num-gpu-blocks-override", str(CACHE_TOKENS // 32), *ONE_PROCESS),
    )
    return small_engine(f"single-{dtype}", model, dtype, arguments, False, False)
