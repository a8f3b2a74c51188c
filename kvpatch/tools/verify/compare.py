"""Digests of caches, what differs between set-ups and the engines of a pair, and how it is said.

A *head digest* is the SHA-256 of one KV head's content of one layer: the bytes of its tokens in
order, each token's channels in order. A *layer fingerprint* is the SHA-256 over the head digests of
a layer, content by content, heads in their global order. It depends on neither layout, block size
nor tensor parallelism: each rank reports the heads it has, and joining them gives the same
fingerprint as one process with all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpatch.core.errors import EngineFailed
from kvpatch.tools.verify.handoff import Completion
from kvpatch.tools.verify.model import Case

HeadDigests = Mapping[str, str]
"""``"<content>/<global head>"`` -> hexadecimal SHA-256, of one layer."""

LayerFingerprints = dict[str, str]
"""Layer name -> hexadecimal SHA-256."""

STATE = "state"
"""What recurrent states are called among the contents."""


def digest_heads(content: str, first_head: int, rows: npt.NDArray[np.uint8]) -> dict[str, str]:
    """Digest each head of ``rows``, raw bytes of shape [token, head, channel bytes]."""
    return {
        f"{content}/{first_head + head}": hashlib.sha256(rows[:, head].tobytes()).hexdigest()
        for head in range(rows.shape[1])
    }


def layer_fingerprint(layer: str, heads: HeadDigests) -> str:
    """Join head digests into a layer's fingerprint; raises EngineFailed for a gap in the heads."""
    places = sorted((content, int(head)) for content, head in (key.split("/") for key in heads))
    for content, of_content in itertools.groupby(places, key=lambda place: place[0]):
        found = [head for _, head in of_content]
        if found != list(range(len(found))):
            raise EngineFailed(f"{layer}: expected {content} heads 0..{found[-1]}, found {found}")
    joined = b"".join(bytes.fromhex(heads[f"{content}/{head}"]) for content, head in places)
    return hashlib.sha256(joined).hexdigest()


def join_ranks(ranks: Sequence[Mapping[str, HeadDigests]]) -> LayerFingerprints:
    """The fingerprint of every layer from the reports of all ranks (layer -> head digests).

    Ranks may hold different layers (pipeline parallelism), different heads (tensor parallelism) or
    copies of a head (more ranks than heads); copies must agree. Ranks have copies of a
    state's parts too, of which stock makes some that do not (vLLM #55208): such a layer is like no
    other.

    Raises:
        EngineFailed: no layer at all, a head missing, or copies of a head that differ.
    """
    layers: dict[str, dict[str, str]] = {}
    for rank, report in enumerate(ranks):
        for layer, heads in report.items():
            joined = layers.setdefault(layer, {})
            for key, digest in heads.items():
                known = joined.setdefault(key, digest)
                if known == digest:
                    continue
                if not key.startswith(f"{STATE}/"):
                    raise EngineFailed(
                        f"{layer}: rank {rank} holds another copy of {key} than the ranks before it"
                    )
                joined[key] = hashlib.sha256(bytes.fromhex(known + digest)).hexdigest()
    if not layers or not all(layers.values()):
        raise EngineFailed("no rank reported a layer, or nothing of one")
    return {layer: layer_fingerprint(layer, heads) for layer, heads in layers.items()}


NULL_BLOCK = 0
"""vLLM's placeholder for a block outside a sliding window."""


@dataclass(frozen=True)
class Snapshot:
    """One engine's cache of one prompt.

    ``computed_tokens`` is how many prompt tokens the engine had when it first computed one of them
    itself; on a decode engine all but the last come from the transfer and from its prefix cache.
    ``block_ids`` are the request's blocks, a list for each cache group.
    """

    fingerprints: LayerFingerprints
    computed_tokens: int
    block_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Observation:
    """The answer of one set-up to one prompt, or the ``error`` in its place."""

    completion: Completion | None
    prefill: Snapshot | None = None
    decode: Snapshot | None = None
    error: str = ""


@dataclass(frozen=True)
class CaseVerdict:
    """One prompt under one set-up: how it differs, in words; empty where it does not.

    Attributes:
        tokens: the answer from the reference's.
        transfer: the decode engine's cache from the prefill engine's.
        prefill: the prefill engine's cache from the reference's.
    """

    tokens: str
    transfer: str
    prefill: str

    @property
    def identical(self) -> bool:
        """True if nothing differs that the transfer is responsible for."""
        return not (self.tokens or self.transfer or self.prefill)


def judge(case: Case, observed: Observation, reference: Observation, alone: bool) -> CaseVerdict:
    """Compare one observation with the reference.

    ``alone`` says that the prompt was computed in a step of its own in both. Prompts that are
    batched together are batched by chance, and a matrix product may round differently with the
    number of its rows, so that then only tokens and the transfer itself can be held to be equal.
    """
    return CaseVerdict(
        tokens=_compare_tokens(observed, reference),
        transfer=_compare_transfer(case, observed),
        prefill=_compare_prefill(observed, reference) if alone else "",
    )


def _compare_tokens(observed: Observation, reference: Observation) -> str:
    if observed.completion is None:
        return "failed"
    if reference.completion is None:
        return "the reference failed"
    left, right = observed.completion.token_ids, reference.completion.token_ids
    if left != right:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
        return f"differs at token {sum(1 for _ in same)}"
    if observed.completion.text != reference.completion.text:
        return "same tokens, other text"
    return ""


def _compare_transfer(case: Case, observed: Observation) -> str:
    if observed.completion is None:
        return "no transfer"
    if observed.prefill is None or observed.decode is None:
        missing = "prefill" if observed.prefill is None else "decode"
        return f"the {missing} engine reported no cache"
    had = observed.decode.computed_tokens
    if had < case.tokens - 1:
        return f"the decode engine had {had} of {case.tokens} tokens and computed the rest"
    return _differing(observed.prefill.fingerprints, observed.decode.fingerprints)


def _compare_prefill(observed: Observation, reference: Observation) -> str:
    if observed.prefill is None or reference.prefill is None:
        return "no cache reported"
    if observed.prefill.computed_tokens != reference.prefill.computed_tokens:
        # Prefix hits of other lengths: what was computed is a matrix of other rows.
        return ""
    return _differing(reference.prefill.fingerprints, observed.prefill.fingerprints)


def _differing(left: LayerFingerprints, right: LayerFingerprints) -> str:
    """Counts the layers whose fingerprints differ, or that one side lacks; empty for none."""
    layers = {*left, *right}
    differ = sum(left.get(name) != right.get(name) for name in layers)
    return f"{differ} of {len(layers)} layers differ" if differ else ""


@dataclass(frozen=True)
class SetupComparison:
    """A whole run, judged.

    Attributes:
        observations: set-up -> case name -> observation, in the order in which the set-ups ran.
            The others are held against the first, the reference.
        verdicts: set-up -> case name -> verdict, of the cases that must be identical.
        control: the same, of the cases whose cache was spoiled on purpose.
    """

    cases: tuple[Case, ...]
    observations: Mapping[str, Mapping[str, Observation]]
    verdicts: Mapping[str, Mapping[str, CaseVerdict]]
    control: Mapping[str, Mapping[str, CaseVerdict]]

    @property
    def differences(self) -> dict[str, CaseVerdict]:
        """Every verdict that is not identical, by ``set-up/case``."""
        return {
            f"{setup}/{case}": verdict
            for setup, by_case in self.verdicts.items()
            for case, verdict in by_case.items()
            if not verdict.identical
        }

    @property
    def control_failures(self) -> list[str]:
        """Spoiled prompts that went unnoticed, in tokens or in the cache, as ``set-up/case``.

        A spoiled prompt that fails to answer shows nothing, so it counts as unnoticed too.
        """
        return [
            f"{setup}/{case}"
            for setup, by_case in self.control.items()
            for case, verdict in by_case.items()
            if not (verdict.tokens.startswith("differs") and verdict.transfer.endswith("differ"))
        ]

    @property
    def passed(self) -> bool:
        """True if something was compared, all is identical, and the control was noticed."""
        compared = any(self.verdicts.values())
        return compared and not self.differences and not self.control_failures


def compare(
    cases: Sequence[Case],
    observations: Mapping[str, Mapping[str, Observation]],
    *,
    same_prefill: bool = True,
) -> SetupComparison:
    """Judge every set-up but the first, which is the reference.

    ``same_prefill`` says that prefill engines compute as the reference does, to the last bit; with
    another number of ranks sums are split otherwise, and only tokens can be held to be equal.
    """
    reference, *others = observations
    together = {case.step for case in cases if sum(other.step == case.step for other in cases) > 1}

    def verdicts(control: bool) -> dict[str, dict[str, CaseVerdict]]:
        return {
            setup: {
                case.name: judge(
                    case,
                    observations[setup][case.name],
                    observations[reference][case.name],
                    alone=same_prefill and case.step not in together,
                )
                for case in cases
                if case.control is control and case.name in observations[setup]
            }
            for setup in others
        }

    return SetupComparison(tuple(cases), observations, verdicts(False), verdicts(True))


# --- what is said of a run ------------------------------------------------------------------


def json_lines(comparison: SetupComparison) -> list[dict[str, Any]]:
    """One record per case: what each set-up answered, its fingerprints, and the verdict."""

    def verdict_of(setup: str, case: Case) -> dict[str, Any] | None:
        verdicts = comparison.control if case.control else comparison.verdicts
        verdict = verdicts.get(setup, {}).get(case.name)
        return None if verdict is None else {**asdict(verdict), "identical": verdict.identical}

    return [
        {
            "case": case.name,
            "prompt_tokens": case.tokens,
            "prompt_token_ids": list(case.token_ids),
            "step": case.step,
            "control": case.control,
            "reference": next(iter(comparison.observations)),
            "setups": {
                setup: {**asdict(by_case[case.name]), "verdict": verdict_of(setup, case)}
                for setup, by_case in comparison.observations.items()
                if case.name in by_case
            },
        }
        for case in comparison.cases
    ]


def write_json_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def errors(comparison: SetupComparison) -> list[str]:
    """Returns each answer of failed requests once, with its first set-up and case."""
    found: dict[tuple[str, str], str] = {}
    for setup, by_case in comparison.observations.items():
        for case, observation in by_case.items():
            if observation.error:
                found.setdefault((setup, observation.error), f"{setup}/{case}")
    return [f"{where}: {error}" for (_, error), where in found.items()]


def sentences(comparison: SetupComparison) -> list[str]:
    """Returns the errors, a line for each prompt that differs though it must not, and the sums."""
    differ, unnoticed = comparison.differences, comparison.control_failures
    lines = errors(comparison)
    for where, verdict in differ.items():
        problems = (f"{what}: {said}" for what, said in asdict(verdict).items() if said)
        lines.append(f"{where}: {'; '.join(problems)}")
    compared = sum(map(len, comparison.verdicts.values()))
    controls = sum(map(len, comparison.control.values()))
    if not compared:
        lines.append("nothing was compared")
    elif differ:
        lines.append(f"{len(differ)} of {compared} differ: {', '.join(differ)}")
    else:
        reference = next(iter(comparison.observations))
        lines.append(
            f"all {compared} identical to {reference}: tokens, and caches from prefill to decode"
        )
    if unnoticed:
        lines.append(f"negative control: NOT NOTICED for {', '.join(unnoticed)}")
    elif controls:
        lines.append(f"negative control: differs (as it must), {controls} of {controls}")
    else:
        lines.append("negative control: not run")
    return lines
