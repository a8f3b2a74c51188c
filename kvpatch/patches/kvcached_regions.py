"""Tensors over kvcached's memory are registered as they lie: split, or in cross-layer blocks.

Why:
    kvcached lays a layer out split-half: the keys of all blocks, then, far away,
    the values of all blocks. Where the backend's shape is ``[blocks, 2, ...]``,
    stock takes keys and values to be neighbours inside a block: for 16 tokens,
    8 heads and 128 channels it steps 32768 elements a block where the tensor
    steps 16384, sends keys where values belong, and never sends a value. Its default,
    contiguous layout has the layers of a block side by side in one pool,
    ``[blocks, layers, 2, 16, 8, 128]``: stock computes addresses from one layer's page
    and moves other layers' bytes, <= 0.23 and in part later without an error.
Where:
    The worker, on P and on D.
How:
    Such tensors are handed to the registration with keys first, and the worker
    is told that its keys and values are apart; from 0.26 on, which knows one
    region a layer, each half is registered as a layer. A peer that does not do
    the same has another number of regions or another block length and refuses
    the handshake; ``unlike_engines`` reads across. Of the contiguous layout NIXL is
    handed the pool once, and peers are told of cross-layer blocks, which a peer
    without kvpatch refuses; reads go through ``unlike_engines``, between two such
    pools one descriptor a block. vLLM's own pools of hybrid models go the same way in
    layouts BLNHC and BLHNC (0.29 on), whose states the release reads from other places.
    Tensors of any other allocator, or of kvcached without its variable in this process, are
    looked at by their strides: where the release takes blocks to lie elsewhere they are
    refused, and where heads and tokens have another order than the backend's peers are told.
    Tensors that contradict kvcached's variables, or one another, are refused, and so is
    a device's memory that a network card could register: it would keep the pages that
    are mapped then.
Upstream:
    kvcached #313 and #391.
Remove when:
    The connector registers every tensor by its strides.
"""

from __future__ import annotations

from kvpatch.core.ledger import Patch
from kvpatch.load.registration import registration_step

PATCH = Patch(
    slug="kvcached_regions", wire_affecting=True, sites=registration_step, document=__doc__
)
