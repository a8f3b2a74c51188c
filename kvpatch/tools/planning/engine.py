"""One engine: its release, device, backend and caches, by a description or by its arguments.

Where arguments leave something open the engine has vLLM's default, and `assumed` says so.
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
from kvpatch.tools.planning.arguments import EngineArguments, plain, whole_number
from kvpatch.tools.planning.backends import Backend, backend_named, default_backend
from kvpatch.tools.planning.description import ITEM_BYTES, Caches, Layer
from kvpatch.tools.planning.known_names import check_names
from kvpatch.tools.planning.model import DESCRIBE, find_config, read_model
from kvpatch.worker.state_division import StateDivision

Role = Literal["P", "D"]

PULL, PUSH = "NixlPullConnector", "NixlPushConnector"

_DEVICES = ("cuda", "rocm", "cpu")
#: A release's names of the two layouts; the second of each is from 0.29 on.
_LAYOUTS = {"HND": ("HND", "LBHNC"), "NHD": ("NHD", "LBNHC")}
_ONE_WORD = {"half": "float16", "float": "float32"}
#: Methods of speculative decoding whose drafts have no layers in the cache.
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


@dataclass(frozen=True)
class PlannedEngine:
    """One engine, as far as a pair is judged by it.

    Attributes:
        model: as ``--model`` names it.
        device: cuda, rocm or cpu.
        caches: of its first rank.
        kernel_tokens: of the blocks that its kernels take.
        layout: as a handshake states it.
        key_order: the order of keys in a block; TILED on a CPU with AMX.
        transfer: of ``--kv-transfer-config``.
        assumed: what its arguments do not say, a sentence each.
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
    def block_tokens(self) -> int:
        """Tokens of the blocks that ids count."""
        return self.caches.block_tokens

    @property
    def parts(self) -> int:
        """Kernel blocks in one of the blocks that ids count."""
        return self.block_tokens // self.kernel_tokens

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of a key."""
        return ITEM_BYTES.get(self.caches.cache_dtype, 1)

    @property
    def inner_layout(self) -> InnerLayout:
        """The order of heads and tokens in memory."""
        return self.backend.inner_layout(inner_layout(self.layout) or "HND", self.facts)

    @property
    def heads(self) -> int:
        """KV heads of a rank."""
        return 1 if self.caches.is_mla else max(1, self.caches.kv_heads // self.tp_size)

    @property
    def has_groups(self) -> bool:
        """True if its connector knows several block tables, or one with a window."""
        return self.facts.has_cache_groups and self.caches.has_groups

    @property
    def division(self) -> StateDivision | None:
        """The way in which ranks share out the states of a layer; None where there are none."""
        return next((layer.division for layer in self.caches.states.values()), None)

    @property
    def drafts(self) -> Mapping[str, Any]:
        """``--speculative-config``, where drafts have layers in the cache; else empty."""
        asked = self.arguments.mapping("speculative_config")
        return {} if asked.get("method") in _WITHOUT_LAYERS else asked

    @property
    def is_push(self) -> bool:
        """True if P writes into D, in place of D reading."""
        return self.transfer.get("kv_connector") == PUSH

    @property
    def has_kvpatch(self) -> bool:
        """True if its processes enable kvpatch."""
        return self.arguments.is_on(settings.ENABLE)

    @property
    def has_prefix_cache(self) -> bool:
        """True if it keeps prompts for later requests."""
        options = self.arguments
        is_off = options.option("no_enable_prefix_caching") is True or bool(self.caches.states)
        return not is_off and options.option("enable_prefix_caching") is not False

    @property
    def device_type(self) -> str:
        """The platform's name in vLLM."""
        return "cuda" if self.device == "rocm" else self.device

    @property
    def buffer_device(self) -> str:
        """The device whose memory NIXL registers, by ``--kv-transfer-config``."""
        default = self.device_type if self.facts.buffer_follows_device else "cuda"
        return str(self.transfer.get("kv_buffer_device") or default)

    @property
    def known_buffer_devices(self) -> list[str]:
        """The devices whose memory the release registers; empty where it has no connector."""
        pairs = (one.partition(": ") for one in self.facts.buffer_devices)
        return sorted(buffer for device, _, buffer in pairs if device == self.device_type)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """The connector's own part of ``--kv-transfer-config``."""
        return self.transfer.get("kv_connector_extra_config") or {}

    def __str__(self) -> str:
        cut = "" if self.parts == 1 else f" in kernel blocks of {self.kernel_tokens}"
        ranks = "" if self.tp_size == 1 else f", {self.tp_size} ranks"
        return (
            f"vLLM {self.facts.release} on {self.device}, {self.backend.name}, blocks of "
            f"{self.block_tokens} tokens{cut}, {self.layout}, {self.caches.cache_dtype}{ranks}"
        )


def engine_of(role: Role, arguments: EngineArguments, config: Path | None = None) -> PlannedEngine:
    """Makes an engine of its arguments.

    Args:
        config: its model's config.json, where that is not found by the model's name.

    Raises:
        BadOptions: they are wrong, or do not say enough.
        CannotPlan: they ask for what is not planned for.
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
        facts, device, transfer = self._facts(), self._device(), self._transfer()
        self._refuse_unplanned(transfer)
        if described is not None:
            caches = described.caches
            backend = self._backend(device, is_mla=caches.is_mla)
        else:
            caches, backend = self._caches(device, name)
        if arguments.option("disable_hybrid_kv_cache_manager") is True and (
            facts.has_cache_groups and caches.has_groups
        ):
            self._refuse("--disable-hybrid-kv-cache-manager of a model with several block tables")
        kernel_tokens = self._kernel_tokens(backend, facts, caches)
        found = PlannedEngine(
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
        if found.buffer_device == "cpu" and device != "cpu" and facts.has_host_buffer:
            self._refuse("a buffer in host memory (kv_buffer_device)")
        return found

    def _refuse(self, what: str, cure: str = SEND_ONE) -> None:
        raise CannotPlan(f"{self.arguments.source}: not planned for: {what}", cure)

    def _refuse_unplanned(self, transfer: Mapping[str, Any]) -> None:
        """Refuses what changes caches or transfers in ways that are not worked out here.

        Raises:
            CannotPlan: there is some.
        """
        arguments = self.arguments
        for name in ("pipeline", "decode_context", "prefill_context"):
            if arguments.number(f"{name}_parallel_size", 1) > 1:
                self._refuse(f"--{plain(name)}-parallel-size above 1")
        if arguments.environment.get(settings.HOST_BUFFER, "").lower() == "always":
            self._refuse("the host buffer of kvpatch")
        if arguments.is_on("ENABLE_KVCACHED"):
            self._refuse("the memory of kvcached (docs/how-to/kvcached.md)")
        if transfer.get("kv_connector_module_path"):
            self._refuse("a connector of a kv_connector_module_path")
        if transfer.get("kv_connector") == "MultiConnector":
            cure = "write the NixlConnector that is in it as kv_transfer_config"
            self._refuse("MultiConnector", cure)
        if transfer.get("enable_permute_local_kv"):
            self._refuse("enable_permute_local_kv")

    def _facts(self) -> ReleaseFacts:
        named = self.arguments.environment.get(settings.GENERATION)
        if named:
            return facts_named(named)
        release = self.arguments.about.get("release")
        if release is None:
            raise BadOptions(
                f"{self.arguments.source}: which release of vLLM is it?",
                "write `release` into the section kvpatch, or give --release",
            )
        return facts_of(str(release), settings.generation_override())

    def _device(self) -> str:
        arguments = self.arguments
        found = arguments.about.get("platform") or arguments.environment.get("VLLM_TARGET_DEVICE")
        if found is None:
            self.assumed.append("it runs on a CUDA device (`platform` says another)")
            return "cuda"
        if str(found) not in _DEVICES:
            self._refuse(f"platform {found}", f"write one of {', '.join(_DEVICES)}")
        return str(found)

    def _transfer(self) -> Mapping[str, Any]:
        found = self.arguments.mapping("kv_transfer_config")
        if not found:
            self.assumed.append("it has NixlConnector (it has no --kv-transfer-config)")
        return found

    # --- caches, where vLLM was not asked -------------------------------------------------

    def _caches(self, device: str, name: str) -> tuple[Caches, Backend]:
        """The caches of a known model, and the backend that decides on their blocks."""
        arguments = self.arguments
        path = find_config(name, self._config_path(name))
        model = read_model(path)
        backend = self._backend(device, is_mla=model.is_mla)
        asked = arguments.option("block_size")
        tokens = backend.default_tokens
        if asked is not None:
            tokens = whole_number(asked, f"{arguments.source}: --block-size")
        else:
            self.assumed.append(
                f"vLLM gives {backend.name} blocks of {tokens} tokens (`block-size` says another)"
            )
        dtypes = self._dtypes(model.dtype)
        ranks = arguments.number("tensor_parallel_size", 1)
        heads = 1 if model.is_mla else max(1, model.kv_heads // ranks)
        layers = tuple(
            Layer(
                *(f"layer.{number}", model.kind(number), backend.name, tokens, 0, dtypes[1:]),
                kv_heads=heads,
                head_dim=model.head_dim,
                window=window,
            )
            for number, window in enumerate(model.windows)
        )
        groups = tuple(tuple(f"layer.{number}" for number in group) for group in model.groups)
        sizes = (0, tokens, 0, "", model.heads, model.kv_heads)
        return Caches(*sizes, *dtypes, layers, groups), backend

    def _config_path(self, name: str) -> Path | None:
        """The config.json that is given; a relative path begins at the arguments' file."""
        folder, given = Path(self.arguments.source).parent, self.arguments.about.get("model-config")
        if given is not None:
            return folder / str(given)
        has_one = self.config is None and (folder / name / "config.json").is_file()
        return folder / name if has_one else self.config

    def _dtypes(self, checkpoint: str) -> tuple[str, str]:
        """The data types of the model and of its cache."""
        model = str(self.arguments.option("dtype", "auto"))
        if model == "auto" and checkpoint == "float32":
            self.assumed.append(
                "vLLM casts a checkpoint in float32 to bfloat16 (`dtype` says another)"
            )
            model = "bfloat16"
        model = checkpoint if model == "auto" else _ONE_WORD.get(model, model)
        cache = str(self.arguments.option("kv_cache_dtype", "auto"))
        cache = model if cache == "auto" else cache
        if model not in ITEM_BYTES or (cache not in ITEM_BYTES and not cache.startswith("fp8")):
            self._refuse(f"--dtype {model} with --kv-cache-dtype {cache}", DESCRIBE)
        return model, cache

    # --- what neither a description nor config.json says ---------------------------------

    def _backend(self, device: str, *, is_mla: bool) -> Backend:
        arguments = self.arguments
        asked = (
            arguments.about.get("attention-backend")
            or arguments.option("attention_backend")
            or arguments.mapping("attention_config").get("backend")
            or arguments.environment.get("VLLM_ATTENTION_BACKEND")
        )
        found = backend_named(str(asked)) if asked else default_backend(device, is_mla=is_mla)
        if found.is_mla != is_mla:
            raise BadOptions(
                f"{arguments.source}: {found.name} is no backend for this model, which "
                f"{'has' if is_mla else 'has no'} latents (MLA)",
                "use one that is made for it",
            )
        if not asked and device != "cpu":
            self.assumed.append(
                f'vLLM chooses {found.name} (it depends on the card: its log says "Using ... '
                'backend"; `attention-backend` says another)'
            )
        return found

    def _kernel_tokens(self, backend: Backend, facts: ReleaseFacts, caches: Caches) -> int:
        """Tokens of a kernel block, where neither a description nor the file states them."""
        stated, tokens = self.arguments.about.get("kernel-block-size"), caches.block_tokens
        found = caches.kernel_tokens or tokens
        if stated is not None:
            found = whole_number(stated, f"{self.arguments.source}: kernel-block-size")
        elif not caches.kernel_tokens and facts.cuts_blocks:
            found = backend.kernel_sizes(facts).kernel_of(tokens) or 0
        if not found or tokens % found or (found < tokens and not facts.cuts_blocks):
            raise BadOptions(
                f"{self.arguments.source}: {backend.name} of vLLM {facts.release} takes no blocks "
                f"of {tokens} tokens",
                "give another --block-size",
            )
        return found

    def _layout(self, facts: ReleaseFacts, caches: Caches) -> str:
        """The layout that is described, asked for, or asked for by NixlConnector."""
        asked = self.arguments.environment.get("VLLM_KV_CACHE_LAYOUT")
        asked = asked or self.arguments.option("kv_cache_layout")
        if caches.kernel_tokens:
            asked = caches.layout
        name = str(asked or ("NHD" if caches.is_mla else "HND")).upper()
        for names in _LAYOUTS.values():
            if name in names:
                return names[facts.names_layouts]
        raise CannotPlan(
            f"{self.arguments.source}: not planned for: KV cache layout {name}", "use HND or NHD"
        )

    def _key_order(self, backend: Backend, caches: Caches, kernel_tokens: int) -> KeyOrder:
        """TILED where the processor's matrix kernels take over."""
        are_whole = kernel_tokens % TILED_TOKENS == 0
        are_whole &= caches.first.head_dim % TILED_CHANNELS == 0
        is_cpus = backend.key_order is KeyOrder.COLUMN_MAJOR
        if not is_cpus or caches.cache_dtype != "bfloat16" or not are_whole:
            return backend.key_order
        has_amx = self.arguments.about.get("amx")
        if has_amx is None:
            self.assumed.append(
                "its processor has AMX, which tiles keys and values of bfloat16 (`amx: false` "
                "denies it)"
            )
        return KeyOrder.TILED if has_amx in (None, True) else backend.key_order
