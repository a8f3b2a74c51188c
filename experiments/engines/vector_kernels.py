"""The CPU backend as on a processor without AMX, on one that has it.

Its vector kernels are the wheel's own, and keep keys of bfloat16 by column; only the question which
kernels to take is answered otherwise. For vLLM 0.32.
"""

from __future__ import annotations

import torch

from kvpatch.tools.verify.probe import CacheProbe


class VectorKernelsProbe(CacheProbe):
    """The probe; that its module was imported is what hides AMX from the worker."""


def _has_none() -> bool:
    return False


torch.cpu._is_amx_tile_supported = _has_none
