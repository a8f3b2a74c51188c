"""A stand-in for torch_xla's tensors: a shape and a kind, blocks in and out, and no memory.

The elements lie in an ordinary tensor behind it, which tests look at. Its device is called a
CPU here, where there is no other. What it does is what torch_xla's CPU device was seen to do
(``test_xla.py``, here and in the lab); it does it at once, where that one waits to be told.
"""

from __future__ import annotations

from typing import Any

import torch

#: Floats that XLA's CPU computes with as others, so that a copy makes one NaN of all.
_ONE_NAN = (torch.bfloat16, torch.float16)
_ALLOWED = ("aten.index_select.default", "aten.index_copy_.default")


class NoStorage:
    """What such a tensor has for a storage."""

    def data_ptr(self) -> int:
        raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")


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
        return NoStorage()

    def data_ptr(self) -> int:
        return 0

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
        if not str(function).endswith("copy_.default"):
            return found
        if first.dtype in _ONE_NAN:  # of the whole tensor, whatever was copied
            first.behind[first.behind.isnan()] = torch.nan
        return first
