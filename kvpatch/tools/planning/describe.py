"""Asks the installed vLLM for the caches of an engine: no weights, no device.

vLLM's own parser reads the command, its configuration and its attention selection decide, its
class of the model is built on the meta device as the first of all ranks, and its own code plans
the caches of that. No other process is started: the groups of ranks are torch's fake ones, which
have every size and move nothing.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.core.installed import installed_facts
from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.peer import peer_hash
from kvpatch.peer.engine_description import TRANSFER, Caches, caches_of, content_of
from kvpatch.peer.peer_hash import own_factors
from kvpatch.worker.kv_cache_groups import spec_of
from kvpatch.worker.release_worker import ReleaseWorker

_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_SERVERS = ("vllm.entrypoints.openai.api_server", "serve")
#: The errors that vLLM raises for a configuration or a model that it does not take.
_ERRORS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError)
_VLLMS_ERRORS = (*_ERRORS, TypeError, ValueError)
_ARGUMENTS = "give kvpatch plan the engine's arguments"
#: The class of vLLM's that starts nothing.
_COMMUNICATOR = (
    "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
)
#: More than any cache takes; nothing is allocated.
_MEMORY_BYTES = 1 << 50


def describe(
    command: Sequence[str], platform: str | None = None, attention_backend: str | None = None
) -> dict[str, Any]:
    """The description of the engine that a command would start.

    Args:
        command: ``vllm serve MODEL ...``, behind variables as a shell has them (``NAME=value``).
        platform, attention_backend: of the engine, where it runs on another platform.

    Raises:
        BadOptions: the command is none, or vLLM does not take it, or cannot describe its engine.
        ReleaseNotKnown: there is no vLLM, or it is none of kvpatch's releases.
    """
    variables, arguments = _split(command)
    settings.set_variables(variables)
    found = settings.engine_variables()
    facts = installed_facts()
    if not facts.server_arguments:
        first = next(known.release for known in FACTS.values() if known.server_arguments)
        raise BadOptions(
            f"not described: vLLM {facts.release}, which is before {first}", _ARGUMENTS
        )
    settings.set_variables({"VLLM_LOGGING_LEVEL": found.get("VLLM_LOGGING_LEVEL", "ERROR")})
    with redirect_stdout(sys.stderr):  # which is the description's alone
        try:
            return _Describing(facts, found, platform, attention_backend).described(arguments)
        except _VLLMS_ERRORS as error:
            raise BadOptions(
                f"vLLM {facts.release} does not make an engine of this here: "
                f"{' '.join(str(error).split()):.600}",
                "change what it names",
            ) from error


def _split(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables before a command, and the arguments of the API server behind it."""
    words = list(command)
    variables: dict[str, str] = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    server = next((n for n, word in enumerate(words) if word in _SERVERS), None)
    if server is None or server > 2:  # python -m MODULE
        raise BadOptions(
            f"{' '.join(words)!r:.80} starts no API server of vLLM's",
            "write kvpatch describe -- vllm serve MODEL, with its arguments",
        )
    return variables, words[server + 1 :]


@contextmanager
def _one_of(ranks: int) -> Iterator[None]:
    """Lets vLLM make its groups of ranks in a process that is alone."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    groups = torch.distributed
    new_group, queue = groups.new_group, shm_broadcast.MessageQueue
    neighbours = parallel_state.in_the_same_node_as
    own = current_platform.get_device_communicator_cls
    groups.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    groups.new_group = lambda of=None, timeout=None, **_: new_group(of, timeout, "fake")
    parallel_state.in_the_same_node_as = lambda *_, **__: [True] * ranks
    shm_broadcast.MessageQueue = SimpleNamespace(create_from_process_group=lambda *_, **__: None)
    # The platform's own communicator waits for its peers, in shared memory or over NCCL.
    current_platform.get_device_communicator_cls = lambda: _COMMUNICATOR
    try:
        yield
    finally:
        groups.new_group, shm_broadcast.MessageQueue = new_group, queue
        parallel_state.in_the_same_node_as = neighbours
        current_platform.get_device_communicator_cls = own
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@dataclass(frozen=True)
class _Describing:
    """Asks one vLLM, with the variables of the engine."""

    facts: ReleaseFacts
    variables: Mapping[str, str]
    platform: str | None
    backend: str | None

    def described(self, arguments: Sequence[str]) -> dict[str, Any]:
        asked, config = self._configured(arguments)
        self._refuse(config)
        parallel = config.parallel_config
        with _one_of(parallel.world_size), self._built(config):
            caches = self._caches(config)
            digest, hashed = self._hashed(config)
        found = content_of(self.facts, asked, self.variables, caches)
        if self.platform:
            found["about"]["platform"] = self.platform
        if self.backend and caches.attention:
            found["about"]["attention-backend"] = self.backend
        if hashed is not None:
            found["hash"] = {"digest": digest, "factors": hashed}
        return found

    def _configured(self, arguments: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """Returns the options that were asked for, and vLLM's configuration of them."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.model_executor.models import registry
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # It looks at each model's class in a process of its own, which imports vLLM anew.
        registry._run_in_subprocess = lambda looked_at: looked_at()
        module = importlib.import_module(self.facts.server_arguments)
        parser = module.make_arg_parser(FlexibleArgumentParser())
        given = parser.parse_args(list(arguments))
        if given.model_tag:
            given.model = given.model_tag
        asked = {
            name: value
            for name, value in vars(given).items()
            if value != parser.get_default(name) and name not in ("config", "model_tag")
        }
        given.skip_tokenizer_init = True
        made = AsyncEngineArgs.from_cli_args(given)
        config = made.create_engine_config(UsageContext.OPENAI_API_SERVER)
        asked["model"], transfer = config.model_config.model, config.kv_transfer_config
        if transfer is not None:
            found = {name: getattr(transfer, name) for name in TRANSFER}
            asked["kv_transfer_config"] = {name: one for name, one in found.items() if one}
        return json.loads(json.dumps(asked, default=str)), config

    def _refuse(self, config: Any) -> None:
        """Raises BadOptions for an engine that one rank without a device does not stand for."""
        drafting, what = config.speculative_config, ""
        is_asked = config.cache_config.user_specified_block_size
        if drafting is not None and (drafting.use_eagle() or drafting.uses_draft_model()):
            what = f"drafts of {drafting.method}, whose layers the worker makes"
        elif self.backend is not None and (not is_asked or config.model_config.is_hybrid):
            what = f"blocks of {self.backend} on another platform, without --block-size"
        if what:
            raise BadOptions(f"not described: {what}", _ARGUMENTS)

    @contextmanager
    def _built(self, config: Any) -> Iterator[None]:
        """Builds the first rank's layers in the configuration, and sets blocks that suit them."""
        import torch
        from vllm import distributed
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.platforms import current_platform
        from vllm.utils.torch_utils import set_default_torch_dtype

        parallel = config.parallel_config
        with set_current_vllm_config(config):
            distributed.init_distributed_environment(parallel.world_size, 0, "", 0, "fake")
            distributed.ensure_model_parallel_initialized(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            )
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                initialize_model(vllm_config=config)
            current_platform.update_block_size_for_backend(config)
            yield

    def _caches(self, config: Any) -> Caches:
        from vllm.config import get_layers_from_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backends import utils
        from vllm.v1.engine import core
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs = get_kv_cache_spec(config)
        backends = get_current_attn_backends(config)
        supported = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
        layout = utils.resolve_kv_cache_layout(config, [supported], list(specs.values()))
        memory: list[Any] = [[specs], [_MEMORY_BYTES]]
        if self.facts.groups_layers_first:
            memory.append(core.get_global_kv_cache_groups(config, [specs]))
        planned = core.get_kv_cache_configs(config, *memory)[0]
        by_layer = {
            name: spec_of(group.kv_cache_spec, name)
            for group in planned.kv_cache_groups
            for name in group.layer_names
        }
        kernel_tokens = self._kernel_tokens(config, planned, backends)
        blocks = config.cache_config.block_size, kernel_tokens, layout.name
        return caches_of(config, by_layer, planned.kv_cache_groups, layers, blocks, self.facts)

    def _kernel_tokens(self, config: Any, planned: Any, backends: Sequence[Any]) -> int:
        """Tokens of the blocks that this rank's connector would register; 0 where unknown here."""
        if self.backend is not None:
            return 0
        reader = self.facts.reader
        owner = getattr(importlib.import_module(reader.module), reader.owner)
        worker = SimpleNamespace(vllm_config=config, kv_cache_config=planned)
        worker.attn_backends, worker.num_blocks = backends, planned.num_blocks
        worker.block_size = config.cache_config.block_size
        owner._sync_block_size_with_kernel(worker)
        return int(worker.block_size)

    def _hashed(self, config: Any) -> tuple[str | None, dict[str, Any] | None]:
        """The hash that the release's own code makes, and the factors that come to it."""
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        name = self.backend or get_current_attn_backends(config)[0].get_name()
        module = importlib.import_module(self.facts.reader.module.rpartition(".")[0] + ".metadata")
        make = module.compute_nixl_compatibility_hash
        worker = SimpleNamespace(vllm_config=config, backend_name=name)
        worker.compat_hash = make(config, name)
        setattr(worker, self.facts.topology, None)
        own = own_factors(ReleaseWorker(worker, self.facts))
        if own is None:
            return None, None
        found = {one: own.values[one] for one in self.facts.hash_factors}
        is_push = getattr(config.kv_transfer_config, "kv_connector", "") == "NixlPushConnector"
        found[peer_hash.MODE] = "push" if is_push else "pull"  # known since the first of these
        return make(config, name, transfer_mode=found[peer_hash.MODE]), found
