"""The reference attention backend: right, and the same bits in every layout and block size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM 0.32 is not installed")

from kvpatch.worker.cache_kinds import ROWS  # noqa: E402
from kvpatch.worker.registered_caches import kind_of_backend  # noqa: E402

pytestmark = pytest.mark.serving

_HEADS, _KV_HEADS, _CHANNELS = 4, 2, 8
_LENGTHS = (1, 23, 40)
_QUERIES = (1, 23, 3)  # a decode step, a whole prompt, and a part of one


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from experiments.engines import torch_attention

    # The module's import registers it once. ``--dist worksteal`` may come back to this file later.
    register_backend(AttentionBackendEnum.CPU_ATTN)(torch_attention.TorchAttentionBackend)
    assert AttentionBackendEnum.CPU_ATTN.get_class() is torch_attention.TorchAttentionBackend
    yield torch_attention
    AttentionBackendEnum.CPU_ATTN.clear_override()


def _content() -> list[tuple[Any, Any, Any]]:
    """Query, key and value [token, head, channel] of each request."""
    made = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> Any:
        return torch.randn(tokens, heads, _CHANNELS, generator=made)

    return [
        (draw(queries, _HEADS), draw(length, _KV_HEADS), draw(length, _KV_HEADS))
        for length, queries in zip(_LENGTHS, _QUERIES, strict=True)
    ]


def _paged(backend: Any, layout: str, block_tokens: int, window: int | None) -> Any:
    """The batch's output through a cache of that geometry, filled by the backend itself."""
    blocks = 64
    if layout == "NHD":
        cache = torch.full((blocks, block_tokens, _KV_HEADS, 2 * _CHANNELS), float("nan"))
        cache = cache.transpose(1, 2)
    else:
        cache = torch.full((blocks, _KV_HEADS, block_tokens, 2 * _CHANNELS), float("nan"))
    attention = backend.TorchAttention(
        _HEADS, _CHANNELS, 0.3, num_kv_heads=_KV_HEADS, sliding_window=window
    )
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).reshape(4, 16)
    for number, (_, key, value) in enumerate(_content()):
        tokens = torch.arange(len(key))
        slots = table[number][tokens // block_tokens] * block_tokens + tokens % block_tokens
        padded = torch.cat((slots, torch.tensor([-1])))
        more = torch.zeros(1, _KV_HEADS, _CHANNELS)
        attention.do_kv_cache_update(
            None, torch.cat((key, more)), torch.cat((value, more)), cache, padded
        )
    query = torch.cat([query for query, _, _ in _content()])
    starts = (0, *torch.tensor(_QUERIES).cumsum(0).tolist())
    metadata = backend.TorchMetadata(starts, _LENGTHS, table)
    output = torch.empty_like(query)
    return attention.forward(None, query, None, None, cache, metadata, output)


def _expected(window: int | None) -> Any:
    """The same by torch's own attention, without a cache."""
    outputs = []
    for query, key, value in _content():
        at = torch.arange(len(key) - len(query), len(key))[:, None]
        behind = at - torch.arange(len(key))[None, :]
        seen = (behind >= 0) & (behind < (window or len(key) + 1))
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                attn_mask=seen,
                scale=0.3,
                enable_gqa=True,
            ).transpose(0, 1)
        )
    return torch.cat(outputs)


def test_its_blocks_are_known_to_hold_rows_of_tokens(backend: Any) -> None:
    assert kind_of_backend(backend.TorchAttentionBackend) == ROWS


def test_so_are_those_that_it_has_under_another_backends_name(backend: Any) -> None:
    from experiments.engines import rows_in_torch

    found = rows_in_torch.TorchAttentionBackend
    assert (kind_of_backend(found), found.get_name()) == (ROWS, "FLEX_ATTENTION")


@pytest.mark.parametrize("window", [None, 7])
def test_it_is_right(backend: Any, window: int | None) -> None:
    torch.testing.assert_close(_paged(backend, "HND", 16, window), _expected(window))


def test_geometry_does_not_matter(backend: Any) -> None:
    reference = _paged(backend, "HND", 16, None)
    for layout in ("NHD", "HND"):
        for block_tokens in (3, 16, 48):
            assert torch.equal(_paged(backend, layout, block_tokens, None), reference)


def test_what_it_cannot_do_it_refuses(backend: Any) -> None:
    with pytest.raises(NotImplementedError, match="soft caps"):
        backend.TorchAttention(_HEADS, _CHANNELS, 0.3, logits_soft_cap=30.0)
