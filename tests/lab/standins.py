"""Everything in the lab that is not the release's own code, and why.

Each stand-in replaces something that a CPU-only machine, or one process per
engine, cannot give. None touches the code under test: the connector's workers
and schedulers, what they register, send and read.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from nixl._api import nixl_agent

from tests.serving.patient import patient_nixl


def cpu_platform() -> Any:
    """The platform object: the release's CPU platform, less what it forces.

    Why: the trees are not CPU builds, so nothing would be detected. The CPU
    platform's config check forces its own attention backend's block sizes and
    cache types on every model, and from 0.17 on the worker pins its process
    to the last core, where P and D would fight for it. The trees hold no
    kernels to import, and 0.17 asks torch for a function that newer ones lack. 0.27 asks
    whether memory can be pinned while it imports the platform, before it is known.
    Releases: all.
    """
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class LabPlatform(CpuPlatform):
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            return None

        @classmethod
        def import_kernels(cls) -> None:
            return None

        @classmethod
        def discover_numa_topology(cls) -> list[list[int]]:
            return []

    vllm.platforms._current_platform = LabPlatform()
    torch_utils = sys.modules.get("vllm.utils.torch_utils")
    if hasattr(torch_utils, "PIN_MEMORY"):
        torch_utils.PIN_MEMORY = False
    return vllm.platforms._current_platform


def torch_names() -> None:
    """Names of functions in torch that moved since.

    Why: <= 0.18 the CPU backend asks ``torch._C._cpu`` whether this processor has
    AMX, which the torch that runs here answers under ``torch.cpu``.
    Releases: 0.11.1 to 0.18.
    """
    import torch

    if not hasattr(torch._C._cpu, "_is_amx_tile_supported"):
        torch._C._cpu._is_amx_tile_supported = torch.cpu._is_amx_tile_supported


def processor(*, has_amx: bool) -> None:
    """What torch says of this processor's AMX, for an engine's process.

    Why: the CPU backend chooses its kernels, and with them how keys lie, by the processor, and
    tests are to be the same on any. No kernel runs here: what they would pack, the lab packs.
    Releases: all that ask.
    """
    import torch

    def answer() -> bool:
        return has_amx

    torch.cpu._is_amx_tile_supported = answer
    torch._C._cpu._is_amx_tile_supported = answer


def patient_agents() -> None:
    """NIXL agents whose progress threads wait 0.2 ms between two looks.

    Why: NIXL's Python API sets no wait, so each agent spins on a core of its own,
    and P and D of two releases at once on two cores leave none for the work.
    Releases: all; what is sent and read stays NIXL's own.
    """
    patient_nixl.register()


def loaded_plugin() -> None:
    """NIXL's plugin for UCX is in memory before processes fork.

    Why: each process would load it for half a second, and tests make hundreds of them. Nothing of
    it is called: each agent's UCX is made as ever.
    Releases: all; where NIXL is packed another way, each process loads it.
    """
    bindings = Path(nixl_agent.__init__.__globals__["nixlBind"].__file__).parent
    for plugin in bindings.parent.glob(f".{bindings.name}.*/plugins/libplugin_UCX.so"):
        ctypes.CDLL(str(plugin))


def installed_packages() -> None:
    """What is installed is asked for once, and not in each process.

    Why: a release asks for it to find NIXL's version, and its plugins; it takes half a second.
    Releases: all.
    """
    import importlib.metadata

    for name in ("packages_distributions", "entry_points"):
        setattr(importlib.metadata, name, lru_cache(getattr(importlib.metadata, name)))
    importlib.metadata.packages_distributions()


def column_operation() -> None:
    """The operation that writes keys by column and values by row into a CPU's cache, in Python.

    Why: it is compiled, and a source tree has none of it.
    Releases: those that reorder another backend's blocks for a CPU, from 0.20; where keys are not
    in tiles.
    """
    from vllm import _custom_ops

    def write(
        key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, isa: str
    ) -> None:
        if isa not in ("vec", "vec16"):
            raise NotImplementedError(isa)
        _, heads, tokens, channels = key_cache.shape
        for row, slot in enumerate(slot_mapping.flatten().tolist()):
            block, offset = divmod(slot, tokens)
            for head in range(heads):
                key_cache[block, head].view(channels, tokens)[:, offset] = key[row, head]
                value_cache[block, head, offset] = value[row, head]

    _custom_ops.cpu_attn_reshape_and_cache = write


def model_inspection() -> None:
    """What a model class can do, without importing it.

    Why: the registry asks a subprocess that imports the model's code, which
    costs 7 s and tells a connector nothing.
    Releases: all.
    """
    from vllm.model_executor.models import registry

    def inspect(self: Any) -> Any:
        known = {
            "architecture": self.class_name,
            "is_text_generation_model": True,
            "supports_pp": True,
            "attn_type": "decoder",
            "default_pooling_type": "LAST",
            "default_seq_pooling_type": "LAST",
            "default_tok_pooling_type": "ALL",
            "score_type": "bi-encoder",
            "supported_video_pruning_methods": (),
        }
        names = [f.name for f in fields(registry._ModelInfo)]
        return registry._ModelInfo(**{name: known.get(name, False) for name in names})

    registry._LazyRegisteredModel.inspect_model_cls = inspect


@contextmanager
def tensor_parallel(rank: int, size: int) -> Iterator[None]:
    """This process as rank `rank` of `size`, while a worker is made or called.

    Why: all ranks of an engine live in one process, and the connector asks the
    group only for rank and size.
    Releases: all.
    """
    from vllm.distributed import parallel_state

    saved = parallel_state._TP
    parallel_state._TP = types.SimpleNamespace(
        rank=rank, rank_in_group=rank, world_size=size, ranks=list(range(size)), local_rank=rank
    )
    try:
        yield
    finally:
        parallel_state._TP = saved


def must_pretend_cuda(family: str) -> bool:
    """Whether workers only take these host tensors if they believe in CUDA.

    Why: 0.10.0 registers everything as VRAM; 0.10.1 to 0.11.0 take host memory
    only as a staging buffer; 0.12.0 to 0.15.1 read every cache of a CPU device
    as one of the CPU backend's, whatever the backend is.
    Releases: 0.10.0 to 0.11.0; 0.12.0 to 0.15.1 unless the family is "cpu".
    """
    from .release import connector_module, is_package

    if is_package():
        return False
    module = connector_module()
    registration = inspect.getsource(module.NixlConnectorWorker.register_kv_caches)
    only_accelerators = "cpu" not in getattr(module, "_NIXL_SUPPORTED_DEVICE", ())
    return only_accelerators or (family != "cpu" and 'self.device_type == "cpu"' in registration)


def set_device_type(device: str) -> None:
    """Tells the connector what device this is, and NIXL that it is host memory.

    Releases: as `must_pretend_cuda` says; elsewhere `device` is "cpu", the truth.
    """
    from vllm.platforms import current_platform

    from .release import worker_modules

    current_platform.device_type = device
    for module in worker_modules() if device == "cuda" else ():
        wrapper = getattr(module, "NixlWrapper", None)
        if wrapper is not None and wrapper.__name__ != "HostMemoryAgent":
            module.NixlWrapper = host_memory_agent(wrapper)


def use_gpu() -> None:
    """The CPU's platform as that of the first GPU, as far as a connector asks it.

    Why: CUDA's own platform asks for compiled kernels. The caches are in the GPU's memory.
    Releases: all, where the lab's caches are to lie on a GPU.
    """
    import torch
    from vllm.platforms import current_platform

    torch.cuda.set_device(0)
    current_platform.device_type = "cuda"
    current_platform.set_device = torch.cuda.set_device


def number_devices(worker: Any) -> None:
    """Has memory of one allocation say that it is on device 0.

    Why: the release asks it for its device's number, which host memory has not.
    Releases: 0.24 to 0.28, where a worker is to believe in CUDA.
    """
    register = getattr(worker, "_register_packed_kv_cache", None)
    if register is None:
        return

    def numbered(storage: Any) -> Any:
        shown = types.SimpleNamespace(
            nbytes=storage.nbytes, data_ptr=storage.data_ptr, device=types.SimpleNamespace(index=0)
        )
        return register(shown)

    worker._register_packed_kv_cache = numbered


def copy_blocks(sources: Any, targets: Any, of: list[int], into: list[int], direction: str) -> None:
    """What the runner of a device with a mirror hands over for its copies.

    Why: the release's own asks the platform, which imports that device's kernels.
    Releases: all that mirror; which dimension counts blocks is asked of the release's source.
    """
    platform = Path(sys.modules["vllm.platforms"].__file__ or "").with_name("xpu.py")
    second = "src_cache[:, src_block_indices]" in platform.read_text()
    for name, source in sources.items() if of else ():
        if second:
            targets[name][:, into] = source[:, of]
        else:
            targets[name][into] = source[of]


def restore_remote_blocks(worker: Any) -> None:
    """After registration a worker only makes index tensors on its device.

    Why: a CPU build of torch cannot make them on CUDA.
    Releases: as `must_pretend_cuda` says.
    """
    worker.device_type = "cpu"


def host_memory_agent(wrapper: type[Any]) -> type[Any]:
    """The NIXL agent with "VRAM" read as "DRAM" and every device as 0.

    Why: 0.10.0 gives ``tensor.device.index``, which is None for host tensors,
    as the device, and the rank elsewhere.
    Releases: as `must_pretend_cuda` says.
    """

    class HostMemoryAgent(wrapper):  # type: ignore[misc, valid-type]
        def get_reg_descs(self, descs: Any, mem_type: Any = None, *a: Any, **k: Any) -> Any:
            if isinstance(descs, list):
                descs = [(address, length, 0, tag) for address, length, _, tag in descs]
            return super().get_reg_descs(descs, "DRAM", *a, **k)

        def get_xfer_descs(self, descs: Any, mem_type: Any = None, *a: Any, **k: Any) -> Any:
            if isinstance(descs, list):
                descs = [(address, length, 0) for address, length, _ in descs]
            elif isinstance(descs, np.ndarray):
                descs = descs.copy()
                descs[:, 2] = 0
            return super().get_xfer_descs(descs, "DRAM", *a, **k)

    return HostMemoryAgent


def flashinfer_package() -> None:
    """An empty ``flashinfer``, so that the release's own backend imports.

    Why: only the backend's name and cache shape are used; the kernels need CUDA.
    Releases: all, for the family "flashinfer".
    """

    _empty_package("flashinfer")


def _empty_package(package: str) -> None:
    """A package of which every module is there, and has every name, as an empty class."""

    class Anything(types.ModuleType):
        __path__: list[str] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    class Finder:
        provides = package

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name.split(".")[0] != package:
                return None
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, Finder, is_package=True)

        @staticmethod
        def create_module(spec: Any) -> Any:
            return Anything(spec.name)

        @staticmethod
        def exec_module(module: Any) -> None:
            return None

    if not any(getattr(finder, "provides", None) == package for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


def vision_package() -> None:
    """An empty ``torchvision``, so that models import whose processors of images need it.

    Why: of MiniMax-M3 only the indexer's backend is used, which sees no image.
    Releases: from 0.29, for that backend.
    """
    _empty_package("torchvision")


def tpu_package() -> None:
    """Empty ``tpu_inference`` and ``tpu_commons``, so that the release's Pallas backend imports.

    Why: only the backend's name and cache shape are used; without that package it defines
    operations of torch_xla's, which few machines have.
    Releases: 0.10.2 to 0.13, for the family "pallas".
    """
    for name in ("tpu_inference", "tpu_commons"):  # its name from 0.11.1 on, and before
        sys.modules.setdefault(name, types.ModuleType(name))


def model_layers(vllm_config: Any, backends: dict[str, type[Any]]) -> None:
    """The model's layers, each with the backend that is given, as far as a connector looks at them.

    Why: no model is loaded; from 0.14 on the connector asks the layers of the
    model for their backend.
    Releases: 0.14.0 on (harmless before).
    """
    try:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    except ImportError:
        return

    class Layer(AttentionLayerBase):
        def __init__(self, backend: type[Any]) -> None:
            self._backend = backend

        def get_attn_backend(self) -> type[Any]:
            return self._backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return None

    context = vllm_config.compilation_config.static_forward_context
    context.clear()
    context.update((name, Layer(backend)) for name, backend in backends.items())


def backend_choice(connector_module: Any, backend: type[Any]) -> None:
    """The attention backend that the case asks for, instead of the platform's.

    Why: the CPU platform would name its own backend for every model.
    Releases: 0.10.0 to 0.13.0 (later ones ask the layers, see above).
    """
    if hasattr(connector_module, "get_attn_backend"):
        connector_module.get_attn_backend = lambda *args, **kwargs: backend


class NoStructuredOutput:
    """The engine's keeper of grammars, for prompts that have none.

    Why: the scheduler asks it of every request; its own needs a tokenizer.
    Releases: all, where their own scheduler hands out blocks.
    """

    def grammar_bitmask(self, *arguments: Any) -> None:
        return None

    def should_advance(self, request: Any, new_token_ids: Any = None) -> bool:
        return False

    def accept_tokens(self, request: Any, new_token_ids: Any) -> bool:
        return True
