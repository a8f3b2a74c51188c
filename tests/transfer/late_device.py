"""Fake: a device whose work is done late, and in another order than it was asked for.

A device of torch's own kind (``privateuse1``) in Python: tensors name it as their device, and each
operation on them is put into the current stream. A stream does nothing until somebody waits for it,
and then no more than that: work that nobody waits for comes last. So a wait that is missing shows
as wrong bytes. The memory is the host's, so that bytes can be read and addresses are real.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

NAME = "late"


class LateStream:
    """Fake of ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._asked = self._done = 0

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._asked += 1

    def run(self, until: int | None = None) -> None:
        until = self._asked if until is None else until
        while self._done < until:
            self._done += 1
            self._work.popleft()()

    def wait_event(self, event: LateEvent) -> None:
        self.add(event.synchronize)

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> LateEvent:
        event = LateEvent()
        event.record(self)
        return event

    synchronize = run

    @property
    def is_idle(self) -> bool:
        return not self._work


class LateEvent:
    """Fake of ``torch.cuda.Event``."""

    def __init__(self) -> None:
        self._was_asked = False

    def record(self, stream: LateStream) -> None:
        self.stream, self._until = stream, stream._asked

    def synchronize(self) -> None:
        self.stream.run(self._until)

    def query(self) -> bool:
        """It is not over when it is asked for the first time."""
        if not self._was_asked:
            self._was_asked = True
            return False
        self.synchronize()
        return True


class LateModule:
    """Fake of ``torch.cuda``, which torch finds by the device's name."""

    Stream, Event = LateStream, LateEvent

    def __init__(self) -> None:
        self.model = self._current = LateStream()
        self.of_threads: list[tuple[str, Any]] = []

    def current_stream(self, device: Any = None) -> LateStream:
        return self._current

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def set_device(self, device: Any) -> None:
        """Takes the device for the calling thread's: there is one."""
        self.of_threads.append((threading.current_thread().name, device))

    def is_available(self) -> bool:
        """False: torch is not to pin memory by it."""
        return False


class LateTensor(torch.Tensor):
    """A tensor on the device; ``held`` is its memory as the host sees it."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> LateTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __init__(self, held: torch.Tensor) -> None:
        pass

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        held = tree_map(_held, args), tree_map(_held, {**kwargs, **_on_host(kwargs)})
        is_set = func is torch.ops.aten.set_.source_Storage_storage_offset
        if func.is_view or is_set:
            return tree_map(_late, func(*held[0], **held[1]))
        module = torch.get_device_module(NAME)
        work = partial(func, *held[0], **held[1])
        if func._schema.is_mutable:  # all that are used write to their first argument
            module.current_stream().add(work)
            made = args[0]
        else:
            on_meta = tree_map(_on_meta, held[0]), {**held[1], **_on_meta_device(kwargs)}
            like = func(*on_meta[0], **on_meta[1])
            result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            result.view(torch.uint8).fill_(0xEE)
            module.current_stream().add(lambda: result.copy_(work()))
            is_of_host = torch.device(kwargs.get("device", NAME)).type == "cpu"
            made = result if is_of_host else LateTensor(result)
        if not isinstance(made, LateTensor) and not _is_non_blocking(func, args, kwargs):
            module.current_stream().synchronize()
        return made


def _held(one: Any) -> Any:
    return one.held if isinstance(one, LateTensor) else one


def _late(one: Any) -> Any:
    return LateTensor(one) if isinstance(one, torch.Tensor) else one


def _on_meta(one: Any) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if "device" in kwargs else {}


def _on_meta_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if "device" in kwargs else {}


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    """True if a copy to host memory says that it need not be waited for."""
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking"))


@cache
def _registered() -> torch.library.Library:
    """Makes the device known to torch, once in a process."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, LateModule())
    guard = torch.utils.backend_registration._DummyDeviceGuard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> LateTensor:
        return LateTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> LateTensor:
        return LateTensor(torch.empty_strided(size, stride, dtype=dtype))

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateModule:
    """The device's module, with streams that nothing is in."""
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this torch takes no device that is written in Python")
    _registered()
    module: LateModule = torch.get_device_module(NAME)
    module.model = module._current = LateStream()
    module.of_threads = []
    return module


class Wire:
    """Fake of a NIXL agent: bytes land when it is asked whether they have."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def get_xfer_descs(self, runs: Any, kind: str) -> Any:
        return runs

    def initialize_xfer(self, operation: str, local: Any, remote: Any, *_: Any) -> Any:
        return local, remote

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        for (to, size, _), (from_here, _, _) in zip(
            *(side.tolist() for side in handle), strict=True
        ):
            ctypes.memmove(to, from_here, size)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        """Does nothing: the wire holds nothing."""

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.told.append(notif_msg)
