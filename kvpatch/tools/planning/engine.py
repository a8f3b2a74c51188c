"""One engine as its arguments make it: release, device, backend, blocks, layout, data type.

What arguments leave open is assumed, and each assumption is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpatch.core import settings
from kvpatch.core.errors import SEND_ONE, BadOptions, CannotPlan
from kvpatch.core.releases import ReleaseFacts, facts_named, facts_of
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import TILED_CHANNELS, TILED_TOKENS, InnerLayout, inner_layout
from kvpatch.tools.planning.arguments import EngineArguments, whole_number
from kvpatch.tools.planning.backends import Backend, backend_named, default_backend
from kvpatch.tools.planning.description import Caches
from kvpatch.tools.planning.known_names import check_options, check_variables
from kvpatch.tools.planning.model import ITEM_BYTES, Model, find_config, read_model
from kvpatch.worker.state_division import StateDivision

Role = Literal["P", "D"]

PULL, PUSH = "NixlPullConnector", "NixlPushConnector"
PULL_WORKER = "NixlPullConnectorWorker"

#: Devices whose backends are CUDA's, to what is asked here.
_LIKE_CUDA = ("cuda", "rocm")
_DEVICES = ("cuda", "rocm", "cpu")
_HND, _NHD = ("HND", "LBHNC"), ("NHD", "LBNHC")


@dataclass(frozen=True)
class PlannedEngine:
    """One engine, as far as a pair is judged by it.

    Attributes:
        device: cuda, rocm or cpu.
        block_tokens: of the blocks that ids count.
        kernel_tokens: of the blocks that its kernels take.
        layout: as a handshake states it.
        model_dtype: as ``--dtype`` and the checkpoint come to.
        dtype: of a token's keys and values, as ``--kv-cache-dtype`` and ``--dtype`` come to.
        state_dtypes: of a convolution's states, and of the recurrent ones behind them.
        division: how ranks share out the states of a layer; None where there are none.
        groups: the numbers of the layers of each block table.
        drafted_tokens: that it speculates with; a convolution keeps as many more positions.
        key_order: how keys lie in a block; TILED on a CPU with AMX.
        transfer: of ``--kv-transfer-config``.
        version: vLLM's, with a build's own label where a running engine states it.
        assumed: what was taken for granted, a sentence each.
    """

    role: Role
    arguments: EngineArguments
    facts: ReleaseFacts
    model: Model
    device: str
    backend: Backend
    block_tokens: int
    kernel_tokens: int
    layout: str
    model_dtype: str
    dtype: str
    item_bytes: int
    state_dtypes: tuple[str, str]
    division: StateDivision | None
    groups: tuple[tuple[int, ...], ...]
    drafted_tokens: int
    key_order: KeyOrder
    tp_size: int
    transfer: Mapping[str, Any]
    version: str
    assumed: tuple[str, ...] = ()

    @property
    def state_item_bytes(self) -> tuple[int, int]:
        """Of one number of a convolution's states, and of the others."""
        first, second = (ITEM_BYTES.get(dtype, 1) for dtype in self.state_dtypes)
        return first, second

    @property
    def parts(self) -> int:
        """Kernel blocks in one of the blocks that ids count."""
        return self.block_tokens // self.kernel_tokens

    @property
    def inner_layout(self) -> InnerLayout:
        """How heads and tokens lie in memory."""
        return self.backend.inner_layout(inner_layout(self.layout) or "HND", self.facts)

    @property
    def heads(self) -> int:
        """Of a rank."""
        return 1 if self.model.is_mla else max(1, self.model.kv_heads // self.tp_size)

    @property
    def has_groups(self) -> bool:
        """Whether its layers have several block tables, or one with a window."""
        return self.facts.has_cache_groups and self.model.has_groups

    @property
    def factors(self) -> Mapping[str, Any]:
        """Of the compatibility hash, by the release's names; empty where vLLM was not asked."""
        described = self.arguments.described
        return described.factors or {} if described else {}

    @property
    def states_version(self) -> bool:
        """Whether its version is as vLLM itself has said it, and not as it is written."""
        return bool(self.arguments.described or self.arguments.running)

    @property
    def is_push(self) -> bool:
        """Whether P writes into D, in place of D reading."""
        return self.transfer.get("kv_connector") == PUSH

    @property
    def has_roles(self) -> bool:
        """Whether one engine that is P and D at once is deprecated, and push mode is there."""
        return self.facts.reader.owner == PULL_WORKER

    @property
    def knows_processor(self) -> bool:
        """Whether it is said that a CPU has AMX, or has not."""
        return self.arguments.about.get("amx") is not None

    @property
    def has_kvpatch(self) -> bool:
        """Whether its processes enable kvpatch."""
        return self.arguments.is_on(settings.ENABLE)

    @property
    def device_type(self) -> str:
        """As vLLM's platform calls it."""
        return "cuda" if self.device in _LIKE_CUDA else self.device

    @property
    def buffer_device(self) -> str:
        """What NIXL registers memory of, by ``--kv-transfer-config``."""
        default = self.device_type if self.facts.buffer_follows_device else "cuda"
        return str(self.transfer.get("kv_buffer_device") or default)

    @property
    def known_buffer_devices(self) -> list[str]:
        """What its release registers memory of on its device; empty where it knows no connector."""
        pairs = (one.partition(": ") for one in self.facts.buffer_devices)
        return sorted(buffer for device, _, buffer in pairs if device == self.device_type)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """The connector's own part of ``--kv-transfer-config``."""
        return self.transfer.get("kv_connector_extra_config") or {}

    @property
    def has_mirror(self) -> bool:
        """Whether vLLM's own host buffer is what it registers."""
        on_host = self.buffer_device == "cpu" and self.device != "cpu"
        return on_host and self.facts.has_host_buffer

    def __str__(self) -> str:
        cut = "" if self.parts == 1 else f" in kernel blocks of {self.kernel_tokens}"
        ranks = "" if self.tp_size == 1 else f", {self.tp_size} ranks"
        return (
            f"vLLM {self.facts.release} on {self.device}, {self.backend.name}, blocks of "
            f"{self.block_tokens} tokens{cut}, {self.layout}, {self.dtype}{ranks}"
        )


def engine_of(role: Role, arguments: EngineArguments, config: Path | None = None) -> PlannedEngine:
    """An engine as its arguments make it.

    Args:
        config: its model's config.json, where that is not found by the model's name.

    Raises:
        BadOptions: they are wrong, or do not say enough.
        CannotPlan: they ask for what is not planned for.
        ReleaseNotKnown: the release is not one of kvpatch's.
    """
    return _Reading(role, arguments, config).engine()


class _Reading:
    """Reads arguments, and keeps what it takes for granted."""

    def __init__(self, role: Role, arguments: EngineArguments, config: Path | None) -> None:
        self._role: Role = role
        self._arguments = arguments
        self._config = config
        self._assumed: list[str] = [f"{role}: {one}" for one in arguments.assumed]

    def engine(self) -> PlannedEngine:
        arguments = self._arguments
        self._refuse_unplanned()
        facts, model, device = self._facts(), self._model(), self._device()
        self._refuse_unplanned_transfer()
        is_one = arguments.option("disable_hybrid_kv_cache_manager") is True
        if is_one and facts.has_cache_groups and model.has_groups:
            raise CannotPlan(
                f"{arguments.source}: one block table for layers with windows or states "
                "(--disable-hybrid-kv-cache-manager) is not planned for",
                f"leave it out, or {SEND_ONE}",
            )
        return PlannedEngine(
            role=self._role,
            arguments=arguments,
            facts=facts,
            model=model,
            device=device,
            tp_size=arguments.number("tensor_parallel_size", 1),
            transfer=self._transfer(),
            version=self._version(facts),
            **self._caches(facts, model, device),
            assumed=tuple(self._assumed),
        )

    def _caches(self, facts: ReleaseFacts, model: Model, device: str) -> dict[str, Any]:
        """The fields that say what caches are, by the description, else worked out."""
        backend = self._backend(device, model)
        described = self._described
        if described is None:
            model_dtype = self._model_dtype(model)
            dtype = self._cache_dtype(model, model_dtype)
            state_dtypes = self._state_dtypes(model, model_dtype)
        else:
            model_dtype, dtype = described.model_dtype, described.cache_dtype
            state_dtypes = described.state_dtypes
        block_tokens = self._block_tokens(backend)
        kernel_tokens = self._kernel_tokens(backend, facts, block_tokens)
        drafted = self._drafted_tokens(model)
        division = model.states.division(state_dtypes, drafted) if model.states else None
        return {
            "backend": backend,
            "block_tokens": block_tokens,
            "kernel_tokens": kernel_tokens,
            "layout": self._layout(facts, model),
            "model_dtype": model_dtype,
            "dtype": dtype,
            "item_bytes": ITEM_BYTES.get(dtype, 1),
            "state_dtypes": state_dtypes,
            "division": described.division if described else division,
            "groups": described.numbered_groups if described else model.block_tables,
            "drafted_tokens": drafted,
            "key_order": self._key_order(backend, dtype, kernel_tokens, model),
        }

    @property
    def _described(self) -> Caches | None:
        found = self._arguments.described
        return found.caches if found else None

    def _version(self, facts: ReleaseFacts) -> str:
        """As a description or a running engine states it."""
        arguments = self._arguments
        if arguments.described:
            return arguments.described.version
        return arguments.running.version if arguments.running else facts.release

    def _assume(self, sentence: str) -> None:
        self._assumed.append(f"{self._role}: {sentence}")

    def _refuse_unplanned(self) -> None:
        """What changes the cache in ways that are not worked out here.

        Raises:
            CannotPlan: it is there.
        """
        arguments = self._arguments
        check_options(arguments.options, arguments.source, is_described=self._described is not None)
        check_variables(arguments.environment, arguments.source)
        sizes = ("pipeline_parallel_size", "decode_context_parallel_size")
        for name in (*sizes, "prefill_context_parallel_size"):
            if arguments.number(name, 1) > 1:
                raise CannotPlan(
                    f"{arguments.source}: --{name.replace('_', '-')} above 1 is not planned for",
                    SEND_ONE,
                )
        if arguments.environment.get(settings.HOST_BUFFER, "").lower() == "always":
            raise CannotPlan(
                f"{arguments.source}: kvpatch's host buffer is not planned for", SEND_ONE
            )
        if arguments.is_on("ENABLE_KVCACHED"):
            raise CannotPlan(
                f"{arguments.source}: kvcached's memory is not planned for "
                "(docs/how-to/kvcached.md says what is read of it)",
                SEND_ONE,
            )

    def _refuse_unplanned_transfer(self) -> None:
        """Connectors that do otherwise than NixlConnector does by default.

        Raises:
            CannotPlan: it is one of them.
        """
        arguments, transfer = self._arguments, self._arguments.mapping("kv_transfer_config")
        connector = transfer.get("kv_connector")
        if transfer.get("kv_connector_module_path"):
            raise CannotPlan(
                f"{arguments.source}: {connector} of {transfer['kv_connector_module_path']} "
                "(kv_connector_module_path) is not planned for",
                SEND_ONE,
            )
        if connector == "MultiConnector":
            raise CannotPlan(
                f"{arguments.source}: MultiConnector is not planned for",
                "write the NixlConnector that is in it as kv_transfer_config",
            )
        if transfer.get("enable_permute_local_kv"):
            raise CannotPlan(
                f"{arguments.source}: enable_permute_local_kv is not planned for",
                "use one VLLM_KV_CACHE_LAYOUT on both sides and leave it out",
            )

    def _facts(self) -> ReleaseFacts:
        named = self._arguments.environment.get(settings.GENERATION)
        if named:
            return facts_named(named)
        release = self._arguments.about.get("release")
        if release is None:
            raise BadOptions(
                f"{self._arguments.source}: which release of vLLM is it?",
                "write `release` into the section kvpatch, or give --release",
            )
        return facts_of(str(release), settings.generation_override())

    def _model(self) -> Model:
        arguments = self._arguments
        name = arguments.option("model") or arguments.option("model_tag")
        if not isinstance(name, str):
            raise BadOptions(f"{arguments.source} names no model", "write `model` into it")
        if self._described is not None:
            return self._described.model(name, arguments.source)
        given = arguments.about.get("model-config")
        config = self._config if given is None else Path(str(given))
        if given is not None and not Path(str(given)).is_absolute():
            config = Path(arguments.source).parent / str(given)
        if config is None and not Path(name).is_absolute():
            beside = Path(arguments.source).parent / name
            config = beside if (beside / "config.json").is_file() else None
        return read_model(name, find_config(name, config))

    def _device(self) -> str:
        arguments = self._arguments
        found = arguments.about.get("platform") or arguments.environment.get("VLLM_TARGET_DEVICE")
        if found is None:
            self._assume("it runs on a CUDA device (`platform` says another)")
            return "cuda"
        if str(found) not in _DEVICES:
            raise CannotPlan(
                f"{arguments.source}: platform {found} is none of those that are planned for "
                f"({', '.join(_DEVICES)})",
                "write one of these",
            )
        return str(found)

    def _backend(self, device: str, model: Model) -> Backend:
        arguments = self._arguments
        asked = (
            arguments.about.get("attention-backend")
            or arguments.option("attention_backend")
            or arguments.mapping("attention_config").get("backend")
            or arguments.environment.get("VLLM_ATTENTION_BACKEND")
        )
        if asked is not None:
            found = backend_named(str(asked))
            if found.is_mla != model.is_mla:
                raise BadOptions(
                    f"{arguments.source}: {found.name} is no backend for {model.name}, which "
                    f"{'has' if model.is_mla else 'has no'} latents (MLA)",
                    "use one that is made for it",
                )
            return found
        found = default_backend(device, is_mla=model.is_mla)
        if model.is_mla and device != "cpu":
            raise CannotPlan(
                f"{arguments.source}: which backend vLLM chooses for latents (MLA) and how many "
                "tokens its blocks have depends on the card",
                "write attention-backend into the section kvpatch, and block-size (its log says "
                '"Using ... backend")',
            )
        if device != "cpu":
            self._assume(
                f'vLLM chooses {found.name} (it depends on the card: its log says "Using ... '
                'backend"; `attention-backend` says another)'
            )
        return found

    def _model_dtype(self, model: Model) -> str:
        asked = str(self._arguments.option("dtype", "auto"))
        if asked not in ("auto", *ITEM_BYTES):
            raise BadOptions(
                f"{self._arguments.source}: --dtype {asked} is none of vLLM's",
                "write one that vLLM has",
            )
        if asked == "auto" and model.dtype == "float32":
            self._assume("vLLM casts a checkpoint in float32 to bfloat16 (`dtype` says another)")
            return "bfloat16"
        found = model.dtype if asked == "auto" else asked
        return {"half": "float16", "float": "float32"}.get(found, found)

    def _cache_dtype(self, model: Model, model_dtype: str) -> str:
        asked = str(self._arguments.option("kv_cache_dtype", "auto"))
        if asked == "auto" and model.cache_dtype:
            raise CannotPlan(
                f"{self._arguments.source}: {model.name} states a KV cache of its own "
                f"({model.cache_dtype:.60})",
                "give --kv-cache-dtype",
            )
        found = model_dtype if asked == "auto" else asked
        if found not in ITEM_BYTES and not found.startswith("fp8"):
            raise CannotPlan(
                f"{self._arguments.source}: --kv-cache-dtype {found} is not planned for", SEND_ONE
            )
        return found

    def _state_dtypes(self, model: Model, model_dtype: str) -> tuple[str, str]:
        if model.states is None:
            return model_dtype, model_dtype
        found, default = [], model_dtype
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
            asked = str(self._arguments.option(name, "auto"))
            default = default if asked == "auto" else asked
            if default not in ITEM_BYTES:
                raise BadOptions(
                    f"{self._arguments.source}: --{name.replace('_', '-')} {asked} is none of "
                    "vLLM's",
                    "write one that vLLM has",
                )
            found.append(default)
        return found[0], found[1]

    def _drafted_tokens(self, model: Model) -> int:
        asked = self._arguments.mapping("speculative_config")
        tokens = asked.get("num_speculative_tokens", 0 if not asked else None)
        if model.states is not None and not isinstance(tokens, int):
            raise CannotPlan(
                f"{self._arguments.source}: --speculative-config has no num_speculative_tokens, "
                "and a convolution's states have as many more positions",
                "write num_speculative_tokens into it",
            )
        return tokens if isinstance(tokens, int) else 0

    def _block_tokens(self, backend: Backend) -> int:
        if self._described is not None:
            return self._described.block_tokens
        asked = self._arguments.option("block_size")
        if asked is not None:
            return whole_number(asked, f"{self._arguments.source}: --block-size")
        self._assume(
            f"vLLM gives {backend.name} blocks of {backend.default_tokens} tokens (`block-size` "
            "says another)"
        )
        return backend.default_tokens

    def _kernel_tokens(self, backend: Backend, facts: ReleaseFacts, block_tokens: int) -> int:
        stated = self._arguments.about.get("kernel-block-size")
        if self._described is not None and self._described.kernel_tokens:
            stated = self._described.kernel_tokens
        if stated is not None:
            found = whole_number(stated, f"{self._arguments.source}: kernel-block-size")
        else:
            found = block_tokens
            if facts.cuts_blocks:
                found = backend.kernel_sizes(facts).kernel_of(block_tokens) or 0
        if not found or block_tokens % found or (found < block_tokens and not facts.cuts_blocks):
            raise BadOptions(
                f"{self._arguments.source}: {backend.name} of vLLM {facts.release} takes no blocks "
                f"of {block_tokens} tokens",
                "give another --block-size",
            )
        return found

    def _layout(self, facts: ReleaseFacts, model: Model) -> str:
        """As it is asked for, or as NixlConnector asks for it."""
        asked = self._arguments.environment.get("VLLM_KV_CACHE_LAYOUT") or self._arguments.option(
            "kv_cache_layout"
        )
        if self._described is not None and self._described.kernel_tokens:
            asked = self._described.layout
        name = str(asked or ("NHD" if model.is_mla else "HND")).upper()
        is_named = facts.names_layouts
        if name in _HND:
            return _HND[is_named]
        if name in _NHD:
            return _NHD[is_named]
        raise CannotPlan(
            f"{self._arguments.source}: KV cache layout {name} is not planned for", "use HND or NHD"
        )

    def _key_order(
        self, backend: Backend, dtype: str, kernel_tokens: int, model: Model
    ) -> KeyOrder:
        """TILED where the processor's matrix kernels take over."""
        are_whole = kernel_tokens % TILED_TOKENS == 0 and model.head_dim % TILED_CHANNELS == 0
        is_cpus = backend.key_order is KeyOrder.COLUMN_MAJOR
        if not is_cpus or dtype != "bfloat16" or not are_whole:
            return backend.key_order
        has_amx = self._arguments.about.get("amx")
        if has_amx is None:
            self._assume(
                "its processor has AMX, which tiles keys and values of bfloat16 (`amx: false` "
                "denies it)"
            )
        return KeyOrder.TILED if has_amx in (None, True) else backend.key_order

    def _transfer(self) -> Mapping[str, Any]:
        found = self._arguments.mapping("kv_transfer_config")
        if not found:
            self._assume("it has NixlConnector (it has no --kv-transfer-config)")
        return found
