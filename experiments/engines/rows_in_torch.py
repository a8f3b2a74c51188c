"""The plain torch backend under FlexAttention's name, beside engines with the CPU's own backend.

A stand-in for a GPU's FlexAttention, which no CPU engine has: its blocks are the same rows in the
same order, so that all that a handshake says of it is what FlexAttention's would. For vLLM 0.32.
"""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from experiments.engines import torch_attention


class RowsProbe(torch_attention.TorchCacheProbe):
    """The probe; that its module was imported is what brings the backend in."""


@register_backend(AttentionBackendEnum.CPU_ATTN)
class TorchAttentionBackend(torch_attention.TorchAttentionBackend):
    """Found by kvpatch in the table of releases, and by its class's name in that of kinds.

    Under a name that the table of kinds lacks its blocks would be unknown to an engine that reads.
    """

    @staticmethod
    def get_name() -> str:
        """One whose blocks are packed rows."""
        return "FLEX_ATTENTION"
