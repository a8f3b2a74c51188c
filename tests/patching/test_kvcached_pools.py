"""What is made of kvcached's tensors, variables and pages, on small real tensors.

The lab runs the same checks on kvcached's own view code and every release's worker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from kvpatch.core import settings
from kvpatch.core.errors import ReadRefused, RegistrationRefused
from kvpatch.kvcached.pools import check_pools
from kvpatch.load import mapped_pages
from kvpatch.load.mapped_pages import Driver, driver, filler_of
from kvpatch.load.read_request import ReadRequest
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.registered_caches import read_layers
from kvpatch.worker.release_worker import KEYS_FIRST, LATENT

from .release_workers import reading

BLOCKS, TOKENS, HEADS, CHANNELS, LAYERS = 6, 4, 2, 8, 3


def _read(tensors, order):
    return read_layers(reading(order, tensors), tensors)


def _halves(blocks=BLOCKS, layers=LAYERS):
    return {f"layers.{n}": torch.zeros(2, blocks, TOKENS, HEADS, CHANNELS) for n in range(layers)}


def _check(tensors, order, contiguous=None, page_bytes=None):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(settings, "kvcached_contiguous", lambda: contiguous)
        patched.setattr(settings, "kvcached_page_bytes", lambda: page_bytes)
        check_pools(tensors, _read(tensors, order))


class TestVariables:
    def test_a_single_layers_halves_that_the_variable_denies(self):
        with pytest.raises(RegistrationRefused, match="keys of all blocks before"):
            _check(_halves(layers=1), KEYS_FIRST, contiguous=True)

    @pytest.mark.parametrize("contiguous", [True, False])
    def test_one_layer_of_latents_is_both(self, contiguous):
        latents = {"layers.0": torch.zeros(BLOCKS, TOKENS, CHANNELS)}

        _check(latents, LATENT, contiguous)

    def test_groups_that_share_a_pool_from_its_beginning_are_not_contiguous(self):
        """Gemma: a pool holds a layer of each group, seen in shapes of one size."""
        pool = torch.zeros(BLOCKS * TOKENS * CHANNELS)
        few, many = (pool.view(BLOCKS, n * TOKENS, CHANNELS // n) for n in (1, 2))

        _check({"layers.0": few, "layers.1": many}, LATENT, contiguous=False)

    def test_pools_are_whole_pages(self):
        _check(_halves(), KEYS_FIRST, page_bytes=1536)  # 3072 bytes each
        with pytest.raises(RegistrationRefused, match="Expected multiples of 1024 bytes"):
            _check(_halves(blocks=7), KEYS_FIRST, page_bytes=1024)

    @pytest.mark.parametrize(
        ("layout", "page", "expected"),
        [
            (None, None, (None, None)),
            ("TRUE", "4", (True, 4 * 1024**2)),
            ("1", "x", (False, None)),  # kvcached takes all but true for false
        ],
    )
    def test_are_read_as_kvcached_reads_them(self, monkeypatch, layout, page, expected):
        for name, value in (("CONTIGUOUS_LAYOUT", layout), ("PAGE_SIZE_MB", page)):
            monkeypatch.delenv(f"KVCACHED_{name}", raising=False)
            if value is not None:
                monkeypatch.setenv(f"KVCACHED_{name}", value)

        found = settings.kvcached_contiguous(), settings.kvcached_page_bytes()
        assert found == expected


class TestPools:
    def test_of_one_size_with_unlike_blocks_are_refused_with_both(self):
        pool = torch.zeros(2 * BLOCKS * TOKENS * HEADS * CHANNELS)
        small = pool[: pool.numel() // 2].view(2, BLOCKS, TOKENS, HEADS // 2, CHANNELS)
        tensors = _halves(layers=2) | {"layers.2": small}

        with pytest.raises(
            RegistrationRefused, match=r"512 bytes a block in 6 .*; 256 bytes a block in 6 "
        ):
            _check(tensors, KEYS_FIRST)

    def test_kernel_blocks_of_two_sizes_in_one_size_of_block_are_let_through(self):
        tensors = {
            "layers.0": torch.zeros(BLOCKS, TOKENS, CHANNELS),
            "layers.1": torch.zeros(2 * BLOCKS, TOKENS // 2, CHANNELS),
        }

        _check(tensors, LATENT)


_FILLER = 77
_ATTENTION = Group(frozenset({"layers.0"}), 0)
_STATES = Group(frozenset({"state.0"}), 0, has_state=True)


class TestPages:
    """FAKE driver: pages of 256 bytes, which hold one block of keys or of values."""

    @pytest.mark.parametrize(
        ("mapped", "blocks", "group", "unmapped"),
        [
            # Keys of blocks 2 and 3, and their values 8 blocks behind.
            ({2, 3, 10, 11}, [2, 3], _ATTENTION, None),
            *(({2, 3, 10, 11} - {page}, [2, 3], _ATTENTION, page % 8) for page in (2, 3, 10, 11)),
            ({2, 10}, [3], _STATES, 3),  # a block of recurrent state is attention's memory
            ({2, 10}, [0, 2], _ATTENTION, None),  # what a window has left is not looked at
            (None, [2, 3], _ATTENTION, None),  # without a driver nothing is looked for
        ],
    )
    def test_a_block_without_one_is_named(self, monkeypatch, mapped, blocks, group, unmapped):
        tensors = _halves(layers=1, blocks=8)
        base = tensors["layers.0"].data_ptr()

        def allocation_at(address):
            page = (address - base) // 256
            return 1000 + page if page in mapped else _FILLER

        known = None if mapped is None else Driver(allocation_at, 64)
        monkeypatch.setattr(mapped_pages, "driver", lambda: known)
        pages = mapped_pages.pages_behind(tensors, _read(tensors, KEYS_FIRST))
        order = ReadRequest(TOKENS * len(blocks), TOKENS * len(blocks), (tuple(blocks),), ((1,),))

        refusal = nullcontext()
        if unmapped is not None:
            words = rf"block {unmapped} of layers\.0 is to be fill"
            refusal = pytest.raises(ReadRefused, match=words)
        with refusal:
            mapped_pages.refuse_unmapped(pages, (group,), order, 1)


class TestDriver:
    @pytest.mark.parametrize(
        ("pages", "filler"),
        [
            ([5, 5, 6, 9, 9, 9, 7, 8], 9),  # mapped twice and far apart
            ([5, 5, 6, 6, 7, 7, 8, None], None),  # neighbours may be one large page
        ],
    )
    def test_the_filler(self, pages, filler):
        assert filler_of(Driver(lambda address: pages[address // 10], 1), 0, 80) == filler

    def test_where_none_is_loaded_there_is_none(self):
        assert driver() is None

    def test_is_asked_as_its_header_says(self, tmp_path):
        """FAKE libcuda, compiled here: the two functions, with the header's types."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        source, library = tmp_path / "fake.c", tmp_path / "libcuda.so.1"
        source.write_text(
            "unsigned long long held = 0;\n"
            "int cuMemRetainAllocationHandle(unsigned long long *handle, void *address) {\n"
            "  if ((unsigned long long)address < 0x1f000000000ULL) return 1;\n"
            "  held++; *handle = ((unsigned long long)address >> 21) | 1ULL << 63; return 0; }\n"
            "int cuMemRelease(unsigned long long handle) {\n"
            "  if (!(handle >> 63)) return 1; held--; return 0; }\n"
        )
        build = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
        subprocess.run(build, check=True)
        asked = (
            "import ctypes, sys; from kvpatch.load.mapped_pages import driver\n"
            "assert driver() is None\n"
            "fake = ctypes.CDLL(sys.argv[1]); found = driver()\n"
            "print(found.allocation_at(0x1f0_0020_0000), found.allocation_at(4096),\n"
            "      ctypes.c_ulonglong.in_dll(fake, 'held').value)\n"
        )
        answer = subprocess.run(
            [sys.executable, "-c", asked, str(library)],
            capture_output=True,
            text=True,
            env=os.environ,
            check=True,
        )

        assert answer.stdout.split() == [str(0x1F000200000 >> 21 | 1 << 63), "None", "0"]
