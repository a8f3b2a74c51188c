"""One engine: its release, device, backend and caches, by a description or by its arguments.

Where arguments leave something open the engine has vLLM's default, and `assumed` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpatch.core import settings
from kvpatch.core.errors import SEND_ONE, BadOptions
from kvpatch.core.releases import FACTS, ReleaseFacts, facts_named, facts_of
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import TILED_CHANNELS, TILED_TOKENS, InnerLayout
from kvpatch.peer.engine_description import ITEM_BYTES, Caches
from kvpatch.tools.planning.arguments import (
    DESCRIBE,
    EngineArguments,
    as_mapping,
    check_names,
    nearest,
    plain,
)
from kvpatch.tools.planning.models_and_backends import (
    Backend,
    Model,
    backend_named,
    caches_of,
    find_config,
    read_model,
)

Role = Literal["P", "D"]

#: The release's two layouts by their names; the second of each is from 0.29 on.
_LAYOUTS: Mapping[InnerLayout, tuple[str, str]] = {"HND": ("HND", "LBHNC"), "NHD": ("NHD", "LBNHC")}
_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
#: Methods of speculative decoding whose drafts have no layers in the cache.
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


@dataclass(frozen=True)
class PlannedEngine:
    """One engine, as far as a pair is judged by it.

    Attributes:
        kernel_tokens: of the blocks that its kernels take.
        layout: as a handshake states it.
        key_order: the order of keys in a block; TILED on a CPU with AMX.
        transfer: of ``--kv-transfer-config``.
        assumed: the sentences on what its arguments do not say.
    """

    role: Role
    arguments: EngineArguments
    facts: ReleaseFacts
    model: str
    device: str
    backend: Backend
    caches: Caches
    kernel_tokens: int
    layout: str
    key_order: KeyOrder
    tp_size: int
    transfer: Mapping[str, Any]
    assumed: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Kernel blocks in one of the blocks that ids count."""
        return self.caches.block_tokens // self.kernel_tokens

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of a key."""
        return ITEM_BYTES.get(self.caches.cache_dtype, 1)

    @property
    def inner_layout(self) -> InnerLayout:
        """The order of heads and tokens in memory."""
        is_nhd = self.layout in _LAYOUTS["NHD"] and self.backend.device != "cpu"
        return "NHD" if is_nhd else "HND"

    @property
    def heads(self) -> int:
        """KV heads of a rank."""
        return 1 if self.caches.is_mla else max(1, self.caches.kv_heads // self.tp_size)

    @property
    def drafts(self) -> Mapping[str, Any]:
        """``--speculative-config``, where drafts have layers in the cache; else empty."""
        asked = self.arguments.mapping("speculative_config")
        return {} if asked.get("method") in _WITHOUT_LAYERS else asked

    @property
    def has_kvpatch(self) -> bool:
        """True if its processes enable kvpatch."""
        return self.arguments.is_on(settings.ENABLE)

    @property
    def has_prefix_cache(self) -> bool:
        """True if it keeps prompts for later requests."""
        is_off = self.arguments.option("no_enable_prefix_caching") is True
        is_off |= self.arguments.option("enable_prefix_caching") is False
        return not (is_off or self.caches.states)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """The connector's own part of ``--kv-transfer-config``."""
        what = f"{self.arguments.source}: kv_connector_extra_config"
        return as_mapping(self.transfer.get("kv_connector_extra_config") or {}, what)

    @property
    def lease(self) -> Any:
        """The seconds for which it keeps blocks, as written."""
        return self.extra_config.get("kv_lease_duration", self.facts.blocks_kept_seconds)

    def __str__(self) -> str:
        cut = "" if self.parts == 1 else f" in kernel blocks of {self.kernel_tokens}"
        ranks = "" if self.tp_size == 1 else f", {self.tp_size} ranks"
        blocks = f"blocks of {self.caches.block_tokens} tokens{cut}, {self.layout}"
        engine = f"vLLM {self.facts.release} on {self.device}, {self.backend.name}"
        return f"{engine}, {blocks}, {self.caches.cache_dtype}{ranks}"


@dataclass(frozen=True)
class Pair:
    prefill: PlannedEngine
    decode: PlannedEngine

    @property
    def sides(self) -> tuple[PlannedEngine, PlannedEngine]:
        return self.prefill, self.decode

    def ranks_met(self, rank: int) -> range:
        """Returns the ranks of P from which a rank of D reads."""
        theirs, ours = self.prefill.tp_size, self.decode.tp_size
        if theirs <= ours:
            first = rank * theirs // ours
            return range(first, first + 1)
        ratio = theirs // ours
        return range(rank * ratio, (rank + 1) * ratio)


def engine_of(role: Role, arguments: EngineArguments, config: Path | None = None) -> PlannedEngine:
    """Makes an engine of its arguments, and of its model's config.json if that is given.

    Raises:
        BadOptions: they are wrong, do not say enough, or ask for what is not planned for.
        ReleaseNotKnown: the release is not one of kvpatch's.
    """
    check_names(arguments)
    return _Reading(role, arguments, config, []).engine()


@dataclass(frozen=True)
class _Reading:
    """Reads arguments, and keeps what it takes for granted."""

    role: Role
    arguments: EngineArguments
    config: Path | None
    assumed: list[str]

    def engine(self) -> PlannedEngine:
        arguments, described = self.arguments, self.arguments.described
        name = arguments.option("model") or arguments.option("model_tag")
        if not isinstance(name, str):
            raise BadOptions(f"{arguments.source} names no model", "write `model` into it")
        facts, device = self._facts(), self._device()
        transfer = arguments.mapping("kv_transfer_config")
        if not transfer:
            self.assumed.append("it has NixlConnector (it has no --kv-transfer-config)")
        if described is not None:
            caches = described.caches
            backend = self._backend(device, is_mla=caches.is_mla)
        else:
            given = arguments.about.get("model-config") or self.config
            beside = Path(arguments.source).parent / str(given or name)
            given = beside if beside.exists() else given
            model = read_model(find_config(name, Path(given) if given else None))
            backend = self._backend(device, is_mla=model.is_mla)
            caches = self._caches(backend, model)
        self._refuse_types(backend, caches)
        self._refuse_unplanned(transfer, device, caches)
        kernel_tokens = self._kernel_tokens(backend, facts, caches)
        return PlannedEngine(
            role=self.role,
            arguments=arguments,
            facts=facts,
            model=name,
            device=device,
            backend=backend,
            caches=caches,
            kernel_tokens=kernel_tokens,
            layout=self._layout(facts, caches),
            key_order=self._key_order(backend, caches, kernel_tokens),
            tp_size=arguments.number("tensor_parallel_size", 1),
            transfer=transfer,
            assumed=tuple(f"{self.role}: {one}" for one in self.assumed),
        )

    def _refuse(self, what: str, cure: str = SEND_ONE) -> None:
        raise BadOptions(f"{self.arguments.source}: not planned for: {what}", cure)

    def _refuse_types(self, backend: Backend, caches: Caches) -> None:
        """Refuses types that the backend does not take, and caches with scales in their rows."""
        model, cache = caches.model_dtype, caches.cache_dtype
        if model not in ITEM_BYTES or cache not in (*ITEM_BYTES, *backend.fp8):
            cure = f"write the attention-backend that vLLM's log names, or {DESCRIBE}"
            self._refuse(f"--dtype {model} with --kv-cache-dtype {cache} of {backend.name}", cure)

    def _refuse_unplanned(self, transfer: Mapping[str, Any], device: str, caches: Caches) -> None:
        """Refuses what changes caches or transfers in ways that are not worked out here."""
        arguments, environment = self.arguments, self.arguments.environment
        has_buffer = environment.get(settings.HOST_BUFFER, "").lower() == "always"
        has_buffer |= device != "cpu" and transfer.get("kv_buffer_device") == "cpu"
        is_one = arguments.option("disable_hybrid_kv_cache_manager") is True
        connector = str(transfer.get("kv_connector"))
        hint = nearest(connector, _CONNECTORS)
        if connector == "MultiConnector":
            hint = " (write the NixlConnector that is in it)"
        found = {
            "a buffer in host memory": has_buffer,
            "the memory of kvcached": arguments.is_on("ENABLE_KVCACHED"),
            f"the connector {connector}{hint}": bool(transfer) and connector not in _CONNECTORS,
            "--disable-hybrid-kv-cache-manager of several block tables": (
                is_one and caches.has_groups
            ),
        }
        for name in ("kv_connector_module_path", "enable_permute_local_kv"):
            found[name] = bool(transfer.get(name))
        for name in ("pipeline", "decode_context", "prefill_context"):
            name = f"{name}_parallel_size"
            found[f"--{plain(name)} above 1"] = arguments.number(name, 1) > 1
        for what in (name for name, is_there in found.items() if is_there):
            self._refuse(what)

    def _facts(self) -> ReleaseFacts:
        named = self.arguments.environment.get(settings.GENERATION)
        release = self.arguments.about.get("release")
        if release is None and not named:
            raise BadOptions(
                f"{self.arguments.source}: which release of vLLM is it?",
                "write `release` into the section kvpatch, or give --release",
            )
        own = settings.generation_override()
        whole = f"{release}.0"  # 0.32 is 0.32.0
        text = whole if whole in FACTS else str(release)
        found = facts_named(named) if named else facts_of(text, own)
        if found.cache_shape != "packed":
            first = next(one.release for one in FACTS.values() if one.cache_shape == "packed")
            self._refuse(f"vLLM {found.release}, which is before {first}")
        return found

    def _device(self) -> str:
        found = self.arguments.about.get("platform")
        if found is None:
            self.assumed.append("it runs on a CUDA device (`platform` says another)")
        elif found not in ("cuda", "rocm", "cpu"):
            self._refuse(f"platform {found}", "write one of cuda, rocm and cpu")
        return str(found or "cuda")

    def _backend(self, device: str, *, is_mla: bool) -> Backend:
        arguments = self.arguments
        given = (
            arguments.about.get("attention-backend"),
            arguments.option("attention_backend"),
            arguments.mapping("attention_config").get("backend"),
        )
        asked = sorted({str(name).upper() for name in given if name})
        if len(asked) > 1:
            reason = f"{arguments.source} names the attention backends {' and '.join(asked)}"
            raise BadOptions(reason, "leave out all but one")
        is_wide = device == "cuda" and arguments.option("dtype") in ("float32", "float")
        default = "TRITON_ATTN" if is_wide and not is_mla else None
        found = backend_named(asked[0] if asked else default, device, is_mla=is_mla)
        if not asked and device != "cpu":
            log = 'its log says "Using ... backend", `attention-backend` says another'
            self.assumed.append(f"vLLM chooses {found.name} on this card ({log})")
        return found

    def _caches(self, backend: Backend, model: Model) -> Caches:
        """The caches of a known model."""
        arguments = self.arguments
        tokens = arguments.number("block_size", backend.default_tokens)
        if arguments.option("block_size") is None:
            said = f"vLLM gives {backend.name} blocks of {tokens} tokens"
            self.assumed.append(f"{said} (`block-size` says another)")
        dtype = str(arguments.option("dtype", "auto"))
        if dtype == "auto" and model.dtype == "float32":
            self.assumed.append("vLLM casts float32 to bfloat16 (`dtype` says another)")
            dtype = "bfloat16"
        dtype = {"auto": model.dtype, "half": "float16", "float": "float32"}.get(dtype, dtype)
        cache = str(arguments.option("kv_cache_dtype", "auto"))
        cache = dtype if cache == "auto" else cache
        ranks = arguments.number("tensor_parallel_size", 1)
        return caches_of(model, backend.name, tokens, (dtype, cache), ranks)

    def _kernel_tokens(self, backend: Backend, facts: ReleaseFacts, caches: Caches) -> int:
        """Tokens of a kernel block, as they are described or as the backend cuts blocks."""
        sizes, tokens = backend.kernel_sizes(facts), caches.block_tokens
        found = caches.kernel_tokens or sizes.kernel_of(tokens)
        if backend.name == "FLASHINFER" and not caches.kernel_tokens and found != tokens:
            self.assumed.append(f"its card cuts blocks of {tokens} tokens (a Blackwell may not)")
        if found is None or tokens % found:
            reason = f"{backend.name} of vLLM {facts.release} takes no blocks of {tokens} tokens"
            raise BadOptions(f"{self.arguments.source}: {reason}", "give another --block-size")
        return found

    def _layout(self, facts: ReleaseFacts, caches: Caches) -> str:
        """The layout that is described, asked for, or asked for by NixlConnector."""
        asked = self.arguments.environment.get("VLLM_KV_CACHE_LAYOUT")
        asked = asked or self.arguments.option("kv_cache_layout")
        asked = caches.layout if caches.kernel_tokens else asked
        name = str(asked or ("NHD" if caches.is_mla else "HND")).upper()
        if caches.first.backend == "FLASHINFER" and name in _LAYOUTS["NHD"]:
            self.assumed.append("its card is no Blackwell, where FLASHINFER takes HND alone")
        for names in _LAYOUTS.values():
            if name in names[: 1 + facts.names_layouts]:
                return names[facts.names_layouts]
        raise BadOptions(
            f"{self.arguments.source}: not planned for: KV cache layout {name}", "use HND or NHD"
        )

    def _key_order(self, backend: Backend, caches: Caches, kernel_tokens: int) -> KeyOrder:
        """TILED where the matrix kernels of a CPU take over."""
        if backend.device != "cpu":
            return KeyOrder.ROW_MAJOR
        is_tiled = caches.cache_dtype == "bfloat16" and not (
            kernel_tokens % TILED_TOKENS or caches.first.head_dim % TILED_CHANNELS
        )
        has_amx = self.arguments.about.get("amx")
        if is_tiled and has_amx is None:
            self.assumed.append("its processor has AMX, which tiles keys (`amx: false` denies it)")
        return KeyOrder.TILED if is_tiled and has_amx is not False else KeyOrder.COLUMN_MAJOR
