"""A stand-in for torch_xla's tensors: a shape and a kind, blocks in and out, and no memory.

The elements lie in an ordinary tensor behind it, which tests look at. Its device is called a
CPU here, where there is no other.
"""

from __future__ import annotations

from typing import Any

import torch

_ALLOWED = ("aten.index_select.default", "aten.index_copy_.default")


class StoragelessStandIn(torch.Tensor):
    """Refuses whatever would need a storage, an address or strides of its own."""

    behind: torch.Tensor
    #: What was asked for, over all of them.
    asked: list[str] = []

    @staticmethod
    def __new__(cls, behind: torch.Tensor) -> StoragelessStandIn:
        found = torch.Tensor._make_wrapper_subclass(cls, behind.shape, dtype=behind.dtype)
        found.behind = behind
        return found

    def untyped_storage(self) -> Any:
        raise NotImplementedError("Cannot access storage of StoragelessStandIn")

    def data_ptr(self) -> int:
        raise RuntimeError("Cannot access data pointer of StoragelessStandIn")

    def as_strided(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("StoragelessStandIn has no strides to change")

    def __repr__(self) -> str:
        return f"StoragelessStandIn({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cls.asked.append(str(function))
        if str(function) not in _ALLOWED:
            raise NotImplementedError(f"no {function} on this device")
        first, *more = args
        found = function(first.behind, *more, **(kwargs or {}))
        return first if str(function).endswith("copy_.default") else found
