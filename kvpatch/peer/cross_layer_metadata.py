"""What peers are told of a worker whose blocks are cross-layer blocks, in its agent metadata."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.cross_layer_blocks import CrossLayerBlocks
from kvpatch.peer.agent_metadata import restated
from kvpatch.peer.block_shapes import tokens_of
from kvpatch.peer.cross_layer_form import CrossLayerForm
from kvpatch.worker.recurrent_state import StateInPool, states_digest
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import ReleaseWorker

_LISTENER = "_nixl_handshake_listener"


def as_cross_layer(
    metadata: Any, facts: ReleaseFacts, pool: CrossLayerBlocks, form: CrossLayerForm
) -> Any:
    """A copy of a worker's agent metadata that describes its cross-layer blocks.

    No release takes it for its own layout: those <= 0.12 compare the backend's name, those
    from 0.11.1 on the layout's, and all the length of a block where there are no heads.
    """
    own = {name: getattr(metadata, name) for name in facts.agent_metadata}
    stated: dict[str, Any] = {
        "kv_caches_base_addr": [pool.address],
        "num_blocks": pool.blocks,
        "block_len": pool.block_bytes,  # <= 0.10.2
        "block_lens": [pool.block_bytes],
        "block_strides": [pool.block_bytes],  # from 0.29
        "kv_cache_layout": str(form),
        "attn_backend_name": f"{own.get('attn_backend_name', '')} {form}",
        "region_num_blocks": [pool.blocks],  # this and all below from 0.30
        "region_group_ids": (own.get("region_group_ids") or [])[:1],
        "region_names": [pool.layers[0]],
        "region_mem_types": (own.get("region_mem_types") or [])[:1],
        "region_members": [],
        "packed_member_layouts": {},
    }
    return restated(metadata, facts, stated)


def form_of(
    release: ReleaseWorker,
    pool: CrossLayerBlocks,
    layers: Mapping[str, LayerCache],
    places: str,
    states: Mapping[str, StateInPool],
) -> CrossLayerForm:
    """Asked once the worker knows its kernel blocks; <= 0.17 it finds out as it registers."""
    tokens = min(tokens_of(layers, layers))
    specs = {name: release.spec_of(name) for name in states}
    held = {name: state.place for name, state in states.items()}
    digest = states_digest(places, held, specs)
    return CrossLayerForm(tokens, release.kernel_blocks_per_block, pool.axes, digest)


@contextmanager
def listener_told(release: ReleaseWorker, restate: Callable[[Any], Any]) -> Iterator[None]:
    """In releases <= 0.11.0 a worker starts to answer handshakes while it registers."""
    if release.facts.listens_in_scheduler:
        yield
        return
    worker = release.worker
    listen, before = worker._nixl_handshake_listener, vars(worker).get(_LISTENER)

    def listener(metadata: Any, *more: Any, **named: Any) -> Any:
        return listen(restate(metadata), *more, **named)

    worker._nixl_handshake_listener = listener
    try:
        yield
    finally:
        if before is None:
            del worker._nixl_handshake_listener
        else:
            worker._nixl_handshake_listener = before


def restate_payload(release: ReleaseWorker, pool: CrossLayerBlocks, form: CrossLayerForm) -> None:
    """From 0.11.1 a worker's metadata waits to be fetched."""
    worker, facts = release.worker, release.facts
    if not facts.listens_in_scheduler:
        return
    payload = worker.xfer_handshake_metadata
    if not facts.encodes_metadata:
        worker.xfer_handshake_metadata = as_cross_layer(payload, facts, pool, form)
        return
    import msgspec

    kind = vars(sys.modules[type(payload).__module__])["NixlAgentMetadata"]
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=kind)
    told = copy.copy(payload)
    told.agent_metadata_bytes = msgspec.msgpack.encode(as_cross_layer(metadata, facts, pool, form))
    worker.xfer_handshake_metadata = told
