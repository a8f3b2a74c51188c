"""Descriptors, bytes and memory of a request, against what they come to by hand."""

from __future__ import annotations

import pytest

from kvpatch.geometry.direct_or_staged import DEVICE_MEMORY, staged_seconds
from kvpatch.tools.planning.arguments import read_arguments
from kvpatch.tools.planning.pair import Request
from kvpatch.tools.planning.plan import plan_pair

from .walk import write_side

pytestmark = pytest.mark.patching

#: Keys and values of 8 heads of 128 channels, in bfloat16.
TOKEN_BYTES = 2 * 8 * 128 * 2
LAYERS = 32


PROMPT = Request(1024)


def _plan(folder, p=None, d=None, request=PROMPT, **options):
    sides = [
        read_arguments(write_side(folder, role, **(changes or {})))
        for role, changes in (("p", p), ("d", d))
    ]
    return plan_pair(*sides, request, **options)


def test_a_staged_read_takes_a_run_of_each_block_of_p(tmp_path):
    found = _plan(tmp_path).numbers

    assert (found.way, found.staged_regions) == ("staged", LAYERS)
    assert found.descriptors == 1024 // 128 * LAYERS
    assert found.size_bytes == found.wanted_bytes == 1024 * TOKEN_BYTES * LAYERS
    assert found.staging_bytes == found.size_bytes  # 128 MiB, of a pool of 256
    assert found.seconds == pytest.approx(
        staged_seconds(DEVICE_MEMORY, found.descriptors, found.size_bytes, found.size_bytes)
    )


def test_a_direct_read_takes_a_run_of_each_head_of_each_block_of_d(tmp_path):
    """A head's 32 tokens are in one piece on both sides."""
    found = _plan(tmp_path, d={"env": {"KVPATCH_TRANSFER": "direct"}}).numbers

    assert (found.way, found.direct_regions) == ("direct", LAYERS)
    assert found.descriptors == 1024 // 32 * 8 * LAYERS
    assert found.staging_bytes == 0


def test_staging_never_takes_more_than_the_pool(tmp_path):
    found = _plan(tmp_path, d={"env": {"KVPATCH_STAGING_BYTES": str(1 << 20)}}).numbers

    assert found.staging_bytes == 1 << 20


def test_what_is_cached_is_not_read(tmp_path):
    found = _plan(tmp_path, request=Request(1024, 512)).numbers

    assert found.wanted_bytes == 512 * TOKEN_BYTES * LAYERS


def test_a_rank_of_two_wants_half(tmp_path):
    """And comes by it in runs of whole blocks, of which it wants half the heads."""
    found = _plan(tmp_path, d={"tensor_parallel_size": 2}).numbers

    assert found.wanted_bytes == 1024 * TOKEN_BYTES * LAYERS // 2


def test_a_rank_reads_all_of_ps_ranks(tmp_path):
    found = _plan(tmp_path, p={"tensor_parallel_size": 4}).numbers

    assert found.wanted_bytes == 1024 * TOKEN_BYTES * LAYERS
    assert found.staged_regions + found.direct_regions == 4 * LAYERS


def test_a_like_pair_is_vllms_block_by_block(tmp_path):
    found = _plan(tmp_path, d={"block_size": 128}).numbers

    assert found.descriptors == 1024 // 128 * LAYERS
    assert found.size_bytes == 1024 * TOKEN_BYTES * LAYERS
    assert found.staging_bytes == 0


def test_a_wire_of_half_the_speed_takes_longer(tmp_path):
    slow, fast = (_plan(tmp_path, bytes_per_second=rate).numbers.seconds for rate in (5e9, 10e9))

    assert 1.5 * fast < slow < 2 * fast


def test_a_pair_that_nobody_serves_has_no_numbers(tmp_path):
    found = _plan(tmp_path, d={"kv_cache_dtype": "fp8"})

    assert found.numbers is None
    assert found.kvpatch.verdict.cure == "use one --kv-cache-dtype"


@pytest.mark.parametrize("ranks", [1, 8, 16, 32])
def test_what_several_ranks_have_is_read_once(tmp_path, ranks):
    """Of 8 heads, of which 16 ranks have two copies each and 32 four."""
    found = _plan(tmp_path, {"tensor_parallel_size": ranks}).numbers

    assert found.wanted_bytes == 1024 * TOKEN_BYTES * LAYERS
    assert found.size_bytes == found.wanted_bytes
