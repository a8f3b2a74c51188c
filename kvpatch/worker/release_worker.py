"""A worker of vLLM's as its release has it: where it keeps what kvpatch asks it for.

On releases <= 0.17 the worker takes the number of blocks from the tensors; from 0.18 it
takes it from the plan. Which tensor dimension means what is told by flags, by
the topology's backend, by the worker's backends, or, from 0.29, by the one
logical shape that is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.layout_strides import TILED_CHANNELS
from kvpatch.worker.cache_kinds import PLAIN_CACHE_DTYPES
from kvpatch.worker.kv_cache_groups import Group, planned_groups, spec_of

#: The name under which a tensor of all layers together is registered (0.13 to 0.28).
ALL_LAYERS = "ALL_LAYERS"

KEYS_FIRST = DimensionOrder(("kv", "block", "token", "head", "channel"))
BLOCKS_FIRST = DimensionOrder(("block", "kv", "token", "head", "channel"))
PACKED = DimensionOrder(("block", "head", "token", "packed"))
LATENT = DimensionOrder(("block", "token", "channel"))
LATENT_HEADS = DimensionOrder(("block", "head", "token", "channel"))
SLOTS = DimensionOrder(("block", "slot", "token", "channel"))
INTERLEAVED_HEADS = DimensionOrder(("block", "token", "packed_head", "channel"))

#: Backends whose kernels pack keys in a way that their tensors' shapes do not tell.
_PACKS_KEYS = ("ROCM_ATTN", "ROCM_FLASH")


@dataclass(frozen=True)
class ReleaseWorker:
    """A connector's worker half, read by the facts of its release."""

    worker: Any
    facts: ReleaseFacts

    @property
    def pulls(self) -> bool:
        """True if D reads; in push mode P writes."""
        return hasattr(self.worker, "_read_blocks_for_req")

    @property
    def has_own_mirror(self) -> bool:
        """True if the release's own host buffer is what it registers."""
        return self.facts.has_host_buffer and bool(self.worker.use_host_buffer)

    @property
    def is_where_mirrors_are(self) -> bool:
        """True if engines on this platform may have the release's own host buffer."""
        from vllm.platforms import current_platform

        return current_platform.device_type in ("cuda", "xpu")

    @property
    def nixl_backends(self) -> tuple[str, ...]:
        """Returns the NIXL backends that were asked for; none where it chooses UCX itself.

        There is no other on releases <= 0.10.2.
        """
        return tuple(self.worker.nixl_backends or ()) if self.facts.chooses_backends else ()

    @property
    def context_sizes(self) -> tuple[int, ...]:
        """How many ranks share out the tokens of a block: of a decode's, and of a prefill's."""
        parallel = self.worker.vllm_config.parallel_config
        return tuple(int(getattr(parallel, name)) for name in self.facts.context_sizes)

    @property
    def stages(self) -> int:
        """How many stages the engine's pipeline has, each of which has some of the layers."""
        return int(self.worker.vllm_config.parallel_config.pipeline_parallel_size)

    @property
    def cache_dtype(self) -> str:
        """The type of keys and values, in the words of ``--kv-cache-dtype``."""
        config = self.worker.vllm_config
        found = str(config.cache_config.cache_dtype)
        if found == "auto":
            return str(config.model_config.dtype).removeprefix("torch.")
        return "fp8_e4m3" if found == "fp8" else found

    @property
    def stated_layout(self) -> str | None:
        """The layout that it tells peers; None on 0.10.0, which tells none."""
        return self.worker.kv_cache_layout if self.facts.states_layout else None

    @property
    def memory_layout(self) -> str | None:
        """Returns the layout of what it registers, where a mirror may state another.

        <= 0.25 a mirror has the layout of its tensors' shapes, and states the device's.
        """
        if self.facts.cache_shape == "packed":
            return None
        if not self.has_own_mirror:
            return self.stated_layout
        worker, is_named = self.worker, self.facts.has_host_buffer_layout
        is_permuted = is_named and worker.host_buffer_kv_cache_layout != worker.kv_cache_layout
        return "HND" if is_permuted else "NHD"

    # --- the regions, once it has registered ------------------------------------

    @property
    def addresses(self) -> tuple[int, ...]:
        addresses = self.worker.kv_caches_base_addr[self.worker.engine_id]
        if isinstance(addresses, Mapping):  # by rank, from 0.14
            addresses = addresses[self.worker.tp_rank]
        return tuple(addresses)

    @property
    def region_block_bytes(self) -> tuple[int, ...]:
        if self.facts.has_bytes_by_region:
            return tuple(self.worker.block_len_per_layer)
        return (self.worker.block_len,) * len(self.addresses)

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Returns the bytes of each recurrent state of a layer, as it states them (from 0.18)."""
        if "ssm_sizes" not in self.facts.agent_metadata:
            return ()
        return tuple(map(int, self.worker._mamba_ssm_size))

    @property
    def kernel_blocks_per_block(self) -> int:
        """Kernel blocks in one of the blocks that ids count."""
        has_cut = self.facts.cuts_blocks
        return int(self.worker._physical_blocks_per_logical_kv_block) if has_cut else 1

    # --- the plan ---------------------------------------------------------------

    @property
    def planned_kernel_blocks(self) -> int | None:
        """Returns the same before it registers; None where it does not know it yet (<= 0.17)."""
        return self.kernel_blocks_per_block if self.facts.has_cache_groups else None

    @property
    def planned_blocks(self) -> int | None:
        """Returns the number of blocks to register; None where the tensors decide it (<= 0.17)."""
        return int(self.worker._logical_num_blocks) if self.facts.has_cache_groups else None

    def set_blocks(self, blocks: int) -> None:
        """Makes the worker register another number of blocks.

        Releases <= 0.17 read the number from the first tensor. The caller has checked that all
        tensors agree on it.
        """
        worker = self.worker
        if self.facts.has_cache_groups:
            worker._logical_num_blocks = blocks
            worker.num_blocks = blocks * self.kernel_blocks_per_block
        if self.facts.names_layouts:
            # A copy: the engine and other workers go on reading their own plan.
            worker.kv_cache_config = replace(worker.kv_cache_config, num_blocks=blocks)

    @property
    def expected_layers(self) -> frozenset[str] | int:
        """The layers that must be registered, or how many (<= 0.17)."""
        if self.facts.has_cache_groups:
            return frozenset(self.worker._layer_specs)
        configuration = self.worker.vllm_config
        model = configuration.model_config
        return int(model.get_num_layers_by_block_type(configuration.parallel_config))

    def spec_of(self, layer: str) -> Any:
        """The layer's own spec; None of a layer that only shares another's cache, and <= 0.17."""
        if not self.facts.has_cache_groups:
            return None
        return spec_of(self.worker._layer_specs.get(layer), layer)

    def groups(self, layers: Iterable[str]) -> tuple[Group, ...]:
        """The cache groups of these layers; one <= 0.17."""
        if not self.facts.has_cache_groups:
            return (Group(frozenset(layers), window_tokens=0),)
        return planned_groups(self.worker.kv_cache_config, self.facts, layers)

    def is_readable(self, layer: str, cache: Any) -> bool:
        """True if a layer's tensor is an attention cache in blocks.

        Not recurrent state, a flat buffer, or a pool of other block count.
        """
        if not hasattr(cache, "untyped_storage"):
            return False
        if not self.facts.has_cache_groups:
            return True
        from vllm.v1.kv_cache_interface import AttentionSpec

        # Flat buffers, and pages of bytes that only the plan tells how to read.
        is_attention = cache.ndim >= 3 and isinstance(self.spec_of(layer), AttentionSpec)
        return is_attention and not (self.facts.names_layouts and self._has_other_blocks(layer))

    def _has_other_blocks(self, layer: str) -> bool:
        """True if a layer does not tell how many blocks the plan has (from 0.29)."""
        from vllm.v1.kv_cache_interface import CircularBufferSpec

        spec = self.spec_of(layer)
        # Rings hold a block a request; a compressed cache may be viewed in pages that
        # run across other layers' blocks.
        if isinstance(spec, CircularBufferSpec) or spec.tokens_per_state > 1:
            return True
        # A host-resident group counts the blocks of its own pool.
        groups = self.worker.kv_cache_config.transfer_groups if self.facts.names_regions else ()
        return any(group.host_resident and layer in group.layer_names for group in groups)

    # --- the attention backends --------------------------------------------------

    @property
    def attention_backends(self) -> tuple[Any, ...]:
        """Without those of recurrent state, whose caches have no tokens; none <= 0.11.0."""
        if not self.facts.has_cache_groups:
            return self.backends
        return tuple(backend for backend in self.backends if not self.is_of_state(backend))

    @property
    def backends(self) -> tuple[Any, ...]:
        """Returns the backends of all of its layers; none <= 0.11.0."""
        source = self.facts.shape_source
        if source == "flags":
            return ()
        if source == "topology":
            return (self.worker.kv_topo.attn_backend,)
        if source == "backend":
            return (self.worker.attn_backend,)
        return tuple(self.worker.attn_backends)

    def is_of_state(self, backend: Any) -> bool:
        if self.facts.backends_tell_state:
            return bool(backend.is_ssm())
        return "get_kv_cache_shape" in getattr(backend, "__abstractmethods__", ())

    def orders(self, layer: str) -> tuple[DimensionOrder, ...]:
        """The dimension orders that a layer's attention tensor can have."""
        if self.facts.shape_source == "flags":
            worker, tpu_flag = self.worker, self.facts.tpu_flag
            if worker.use_mla:
                return (LATENT,)
            if tpu_flag and getattr(worker, tpu_flag):
                return (INTERLEAVED_HEADS,)
            return (BLOCKS_FIRST if worker._use_flashinfer else KEYS_FIRST,)
        if self.facts.shape_source == "layout name":
            return self._orders_by_spec(self.spec_of(layer))
        shapes, unreadable = list[DimensionOrder](), list[UnreadableGeometry]()
        for backend in self.attention_backends:
            try:
                shapes.append(self.order_of_backend(backend))
            except UnreadableGeometry as error:
                unreadable.append(error)
        if unreadable and not shapes:
            raise unreadable[0]
        # An allocator that keeps keys and values apart needs a fifth dimension of packed ones too.
        apart = (BLOCKS_FIRST,) if self.facts.cache_shape == "packed" else ()
        return (*dict.fromkeys(shapes), *apart)

    def order_of_backend(self, backend: Any) -> DimensionOrder:
        """Returns the dimension order of a backend's tensors (0.11.1 to 0.28).

        Raises:
            UnreadableGeometry: it has none that is known here, as where tokens of a block are
                stretched at the cost of heads (Whisper's pooled ones).
        """
        shape_of = backend.get_kv_cache_shape
        dtype = signature(shape_of).parameters.get("cache_dtype_str")
        if dtype is None or dtype.default is not Parameter.empty:
            return DimensionOrder.probe(shape_of)
        cache_dtype = str(self.worker.vllm_config.cache_config.cache_dtype)
        return DimensionOrder.probe(shape_of, cache_dtype_str=cache_dtype)

    def _orders_by_spec(self, spec: Any) -> tuple[DimensionOrder, ...]:
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

        if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
            return (LATENT_HEADS, LATENT)
        if spec.num_head_slots is not None:
            return (SLOTS,)
        # The tensor tells only the sum where values have another width than keys.
        is_even = getattr(spec, "head_size_v", spec.head_size) == spec.head_size
        key_channels = None if is_even else int(spec.head_size)
        return (DimensionOrder(PACKED.dimensions, key_channels=key_channels), BLOCKS_FIRST)

    def key_order(self) -> KeyOrder | None:
        """Returns the backend's order of keys inside a block; None where it is unknown."""
        if self.facts.shape_source == "flags":
            return KeyOrder.ROW_MAJOR
        names = self._names_of_backends()
        if not set(names).isdisjoint(_PACKS_KEYS):
            return None
        if "CPU_ATTN" not in names:
            return KeyOrder.ROW_MAJOR
        orders = {self._cpus_key_order(*shape) for shape in self._cpus_shapes()}
        return orders.pop() if len(orders) == 1 else None

    def computes_on_amx(self) -> bool:
        """True if the CPU backend computes some layer's attention with AMX, however it keeps it."""
        if self.facts.shape_source == "flags" or "CPU_ATTN" not in self._names_of_backends():
            return False
        return any(self._cpus_kernels(tokens) == "amx" for tokens, _ in self._cpus_shapes())

    def _names_of_backends(self) -> list[str]:
        if not self.facts.has_cache_groups:
            return [self.worker.backend_name]
        # The worker's own is the first one's, which may be of recurrent state.
        return [backend.get_name() for backend in self.attention_backends]

    def _cpus_kernels(self, block_tokens: int) -> str:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(self.worker.vllm_config.model_config.dtype, block_tokens))

    @property
    def tiles_on_amx(self) -> bool:
        """True if the CPU backend has this model's keys in tiles where a processor has AMX."""
        config = self.worker.vllm_config
        is_plain = config.cache_config.cache_dtype in PLAIN_CACHE_DTYPES
        return is_plain and str(config.model_config.dtype) == "torch.bfloat16"

    def _cpus_key_order(self, block_tokens: int, channels: int) -> KeyOrder | None:
        """Returns the CPU backend's order of keys, by the kernels that it uses."""
        isa = self._cpus_kernels(block_tokens)
        if isa in ("vec", "vec16"):
            return KeyOrder.COLUMN_MAJOR
        if isa != "amx" or not self.tiles_on_amx:  # others pack keys in ways of their own
            return None
        # Heads of no whole number of tiles are the vector kernels' (from 0.14, before which it
        # serves none).
        return KeyOrder.COLUMN_MAJOR if channels % TILED_CHANNELS else KeyOrder.TILED

    def _cpus_shapes(self) -> set[tuple[int, int]]:
        """Returns the tokens of a block and the channels of a head of all layers."""
        worker = self.worker
        found = {(int(worker.block_size), int(worker.model_config.get_head_size()))}
        if self.facts.has_cache_groups:
            from vllm.v1.kv_cache_interface import AttentionSpec

            specs = (self.spec_of(layer) for layer in self.worker._layer_specs)
            planned = [spec for spec in specs if isinstance(spec, AttentionSpec)]
            found = {(int(spec.block_size), int(spec.head_size)) for spec in planned} or found
        return found

    # --- peers of larger blocks ---------------------------------------------------

    def admit_larger_blocks(self) -> None:
        """Lets a peer of larger blocks reach the handshake's own checks."""
        if not self.facts.compares_block_sizes_first:
            return
        worker = self.worker
        if self.facts.topology_has_block_size:
            # Still of the blocks before they were cut into kernel blocks, so that every
            # handshake of a worker that cuts its own fails. 0.12 asks the worker.
            worker.kv_topo.block_size = worker.block_size
        worker.block_size = _AnyPeerFits(worker.block_size)


class _AnyPeerFits(int):
    """A block size to which every peer's is small enough; in all else the number itself.

    0.11.1 to 0.13 compare the two before the handshake gets to where a peer is
    read, in a background thread, while others use the number.
    """

    def __ge__(self, other: object) -> bool:
        return True
