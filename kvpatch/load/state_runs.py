"""The runs that bring a peer's recurrent states, or what of a layer's is ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvpatch.core.errors import AS_ANSWERED, ReadRefused
from kvpatch.geometry.direct_plan import Plan, plan_runs
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.token_pairing import state_pairs
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.remote_states import RemoteStates
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.recurrent_state import StatePages


def states_plan(
    groups: Iterable[Group],
    peer: AgentMetadata,
    request: ReadRequest,
    ours: Mapping[str, StatePages],
    theirs: Mapping[str, RemoteStates],
) -> Plan:
    """The runs that bring each layer's states, as far as one rank of a peer has them.

    Raises:
        ReadRefused: a group has several blocks, or one that the peer has not.
    """
    runs = []
    for group, remote_block, local_block in state_pairs(groups, peer, request):
        for name in sorted(group.layers):
            remote, local = theirs[name].pages, ours[name]
            if remote_block >= remote.blocks or local_block >= local.blocks:
                raise ReadRefused(
                    f"the request names blocks {remote_block} and {local_block} of the states of "
                    f"layer {name}, of {remote.blocks} and {local.blocks}",
                    AS_ANSWERED,
                )
            there = remote.address + remote_block * remote.stride_bytes
            here = local.address + local_block * local.stride_bytes
            runs += [
                (there + run.remote_offset, here + run.local_offset, run.size_bytes)
                for run in theirs[name].runs
            ]
    if not runs:
        return plan_runs(())
    return Plan(*np.asarray(runs, dtype=np.int64).T)
