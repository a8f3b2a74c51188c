"""The mark of tests that run on a GPU: ``pytest -m gpu`` plays them, where there is one."""

from __future__ import annotations

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

#: ``pytest.param(..., marks=GPU)``, or among a test's marks.
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason=f"torch {torch.__version__} finds no CUDA device here"),
)
