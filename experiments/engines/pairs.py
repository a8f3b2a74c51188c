"""The table of heterogeneous pairs: which engines each row is made of.

Pure, but for environments of other releases, which are made where a row of theirs is set up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from experiments.engines.releases import python_of
from experiments.harness import chosen
from kvpatch.tools.verify.engine import TRANSFER_CONFIG, EngineSpec, Setup, small_engine

DTYPE = "float32"
"""vLLM's CPU backend keeps keys by column in it on every x86 machine."""

TILED_DTYPE = "bfloat16"
"""With AMX it keeps keys and values in tiles in it, and without keys by column."""

CUDA_DTYPE = "bfloat16"
"""FlashAttention takes no float32."""

_CUDA = ("--attention-backend", "FLASH_ATTN", "--gpu-memory-utilization", "0.2")
"""FlashAttention on every CUDA device, and room for four engines on one."""

_CUDA_BUFFER = {**TRANSFER_CONFIG, "kv_buffer_device": "cuda"}
"""Connectors read it."""

Kvcached = Literal["contiguous", "split-half"]
"""Which of kvcached's layouts an engine has."""


@dataclass(frozen=True)
class Side:
    """One engine of a row.

    Attributes:
        layout: NHD or HND; None where the backend has one only.
        kvcached: where kvcached allocates the cache, as what.
        release: vLLM's, which has an environment of its own; None for the run's.
        rows: whether it keeps keys in rows under FlexAttention's name, beside CPUs' by column.
        vectors: whether its processor is taken for one without AMX.
    """

    block_tokens: int
    ranks: int = 1
    layout: str | None = None
    kvcached: Kvcached | None = None
    release: str | None = None
    rows: bool = False
    vectors: bool = False

    def __str__(self) -> str:
        parts = (
            str(self.block_tokens),
            f"TP{self.ranks}" if self.ranks > 1 else "",
            self.layout,
            self.kvcached,
            f"on vLLM {self.release}" if self.release else "",
            "in rows" if self.rows else "",
            "without AMX" if self.vectors else "",
        )
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Single:
    """The facts that the single engine and every engine of a row share.

    Attributes:
        cuda: whether they run on a GPU, in bfloat16.
        dtype: on a CPU.
        like: what blocks and kernels the single engine has; None for blocks of its model's. In
            bfloat16 these are D's: sums over a block's tokens are others in blocks of another size.
    """

    model: str = "llama"
    torch_attention: bool = False
    cuda: bool = False
    dtype: str = DTYPE
    like: Side | None = None

    @property
    def has_state(self) -> bool:
        """True if the model has layers with recurrent state."""
        return self.model == "hybrid"

    def __str__(self) -> str:
        attention = ", attention in torch" if self.torch_attention else ""
        return f"{self.model}{attention}{self.of_dtype}"

    @property
    def of_dtype(self) -> str:
        """The data type behind a name, where it is another than most rows'."""
        return "" if self.dtype == DTYPE else f", {self.dtype}"


@dataclass(frozen=True)
class Row:
    """One pair, or several prefill engines with one decode engine.

    Attributes:
        host_buffer_bytes: of each worker's host buffer, on prefill engines and on the decode
            engine with kvpatch; None where caches are read where they are.
    """

    name: str
    prefill: tuple[Side, ...]
    decode: Side
    single: Single = Single()
    host_buffer_bytes: int | None = None

    def __str__(self) -> str:
        kind = "" if self.single.model == "llama" else f", {self.single.model}"
        kind += self.single.of_dtype
        buffer = "" if self.host_buffer_bytes is None else ", host buffers"
        return f"{' + '.join(map(str, self.prefill))} -> {self.decode}{kind}{buffer}"

    @property
    def same_prefill(self) -> bool:
        """True if prefill engines compute as the single engine does, to the last bit.

        With recurrent state they stop a token before the end.
        """
        like = self.single.like
        computes_alike = all(
            side.ranks == 1 and side.release is None and not side.rows and like in (None, side)
            for side in self.prefill
        )
        return computes_alike and not self.single.has_state

    @property
    def accepts(self) -> str:
        """The differences that D accepts (``KVPATCH_ACCEPT``)."""
        sides = (*self.prefill, self.decode)
        unlike = {
            "vllm_version": len({side.release for side in sides}) > 1,
            "attn_backend": len({side.rows for side in sides}) > 1,
        }
        return ",".join(name for name, differs in unlike.items() if differs)


_WINDOW = Single(model="window")
_HYBRID = Single(model="hybrid")
_ROWS = Single(torch_attention=True)

_EIGHTH_BYTES = 128 * 1024**2
"""Of a cache of 1 GiB, which is what each rank of these engines has."""

ROWS: tuple[Row, ...] = (
    Row("128-32", (Side(128),), Side(32)),
    Row("32-128", (Side(32),), Side(128)),
    Row("96-64", (Side(96),), Side(64)),
    Row("64-64", (Side(64),), Side(64)),
    Row("tp1-tp2", (Side(128),), Side(32, ranks=2)),
    Row("tp2-tp1", (Side(32, ranks=2),), Side(128)),
    Row("2p1d", (Side(128), Side(32)), Side(64)),
    Row("nhd-hnd", (Side(32, layout="NHD"),), Side(32, layout="HND"), _ROWS),
    Row("hnd-nhd", (Side(32, layout="HND"),), Side(32, layout="NHD"), _ROWS),
    Row("nhd-hnd-128-32", (Side(128, layout="NHD"),), Side(32, layout="HND"), _ROWS),
    Row("hnd-nhd-48-80", (Side(48, layout="HND"),), Side(80, layout="NHD"), _ROWS),
    Row("window-128-32", (Side(128),), Side(32), _WINDOW),
    Row("window-32-128", (Side(32),), Side(128), _WINDOW),
    Row("hybrid-64-64", (Side(64),), Side(64), _HYBRID),
    Row("hybrid-128-64", (Side(128),), Side(64), _HYBRID),
    Row("hybrid-64-128", (Side(64),), Side(128), _HYBRID),
    Row("hybrid-64-tp1-tp2", (Side(64),), Side(64, ranks=2), _HYBRID),
    Row("hybrid-tp1-tp2", (Side(128),), Side(64, ranks=2), _HYBRID),
    Row("hybrid-tp2-tp1", (Side(64, ranks=2),), Side(128), _HYBRID),
    Row("0.31-0.32", (Side(64, release="0.31.0"),), Side(64)),
    Row("0.32-0.31", (Side(64),), Side(64, release="0.31.0")),
    Row("0.31-0.32-128-32", (Side(128, release="0.31.0"),), Side(32)),
    Row("rows-cpu", (Side(64, rows=True),), Side(64)),
    Row("rows-cpu-128-32", (Side(128, rows=True),), Side(32)),
    Row("cpu-rows", (Side(64),), Side(64, rows=True)),
    Row("cpu-rows-128-32", (Side(128),), Side(32, rows=True)),
    Row("host-64-64", (Side(64),), Side(64), host_buffer_bytes=_EIGHTH_BYTES),
    Row("host-128-32", (Side(128),), Side(32), host_buffer_bytes=_EIGHTH_BYTES),
    Row("host-tp2-tp2", (Side(64, ranks=2),), Side(64, ranks=2), host_buffer_bytes=_EIGHTH_BYTES),
)


def _tiled(name: str, prefill: Side, decode: Side) -> Row:
    return Row(name, (prefill,), decode, Single(dtype=TILED_DTYPE, like=decode))


TILED_ROWS: tuple[Row, ...] = (
    _tiled("tiles-128-32", Side(128), Side(32)),
    _tiled("tiles-32-128", Side(32), Side(128)),
    _tiled("tiles-96-64", Side(96), Side(64)),
    _tiled("tiles-tp2-tp1", Side(32, ranks=2), Side(128)),
    _tiled("tiles-columns", Side(64), Side(64, vectors=True)),
    _tiled("columns-tiles", Side(64, vectors=True), Side(64)),
    _tiled("tiles-columns-128-32", Side(128), Side(32, vectors=True)),
    _tiled("columns-tiles-128-32", Side(128, vectors=True), Side(32)),
)
"""Of bfloat16 on a processor with AMX, beside one without; played where they are named alone."""


def choose(text: str | None, rows: Sequence[Row] = ROWS) -> tuple[Row, ...]:
    """``"128-32,2p1d"`` -> these rows in the order of the table; all of them for None.

    Raises:
        BadOptions: an unknown name, or none.
    """
    names = chosen(text, [row.name for row in rows], "--rows")
    return tuple(row for row in rows if row.name in names)


OPTIONS: Mapping[str, tuple[Any, str]] = {
    "release": (None, "vLLM release that must be installed"),
    "max_tokens": (24, "tokens of each answer"),
    "work_dir": (None, "for logs, models and results; kept"),
    "startup_timeout": (900.0, "seconds that an engine may take to start"),
}
"""Of a command that runs pairs."""


def by_single(rows: Sequence[Row]) -> dict[Single, list[Row]]:
    """The rows that are held against one and the same single engine."""
    grouped: dict[Single, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.single, []).append(row)
    return grouped


def single_setup(single: Single, model: str) -> Setup:
    name = f"single-{single.model}" + ("-torch" if single.torch_attention else "")
    side = single.like or Side(64 if single.has_state else 32)
    name += "" if single.like is None else f"-{single.dtype}-{str(side).replace(' ', '-')}"
    return Setup("single", (engine_of(name, single, side, model, connector=False),))


def row_setups(row: Row, model: str) -> tuple[Setup, Setup]:
    """The set-ups ``stock`` and ``kvpatch``, on the same prefill engines.

    Those have kvpatch only where they have a host buffer, which a stock decode engine reads too,
    or kvcached; or where how their keys lie is theirs alone to say.
    """
    buffer = (
        {}
        if row.host_buffer_bytes is None
        else {
            "KVPATCH_HOST_BUFFER": "always",
            "KVPATCH_HOST_BUFFER_BYTES": str(row.host_buffer_bytes),
        }
    )
    prefill = tuple(
        engine_of(
            f"{row.name}-prefill-{number}",
            row.single,
            side,
            model,
            kvpatch=bool(buffer or side.kvcached) or row.single.dtype == TILED_DTYPE,
            settings=buffer,
        )
        for number, side in enumerate(row.prefill)
    )
    stock = engine_of(f"{row.name}-decode-stock", row.single, row.decode, model)
    patched = engine_of(
        f"{row.name}-decode-kvpatch",
        row.single,
        row.decode,
        model,
        kvpatch=True,
        settings={**buffer, "KVPATCH_ACCEPT": row.accepts} if row.accepts else buffer,
    )
    return Setup("stock", prefill, (stock,)), Setup("kvpatch", prefill, (patched,))


def engine_of(
    name: str,
    single: Single,
    side: Side,
    model: str,
    connector: bool = True,
    kvpatch: bool = False,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> EngineSpec:
    arguments: tuple[str, ...] = ("--block-size", str(side.block_tokens))
    if side.ranks > 1:
        arguments += ("--tensor-parallel-size", str(side.ranks))
    probes = (
        ("rows_in_torch.RowsProbe", side.rows),
        ("vector_kernels.VectorKernelsProbe", side.vectors),
        ("torch_attention.TorchCacheProbe", single.torch_attention),
        ("lab_probe.LabProbe", single.cuda),
    )
    probe = next((name for name, is_wanted in probes if is_wanted), None)
    if probe is not None:
        arguments += ("--worker-extension-cls", f"experiments.engines.{probe}")
    if single.has_state:
        arguments += ("--no-enable-prefix-caching",)
    environment = dict(settings)
    if single.cuda:
        arguments += _CUDA
        if connector:
            arguments += ("--kv-transfer-config", json.dumps(_CUDA_BUFFER))
    if side.kvcached:
        environment |= {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_AUTOPATCH": "1",
            "KVCACHED_CONTIGUOUS_LAYOUT": str(side.kvcached == "contiguous").lower(),
        }
        if not single.cuda:  # the stand-in maps pages where blocks are handed out
            arguments += ("--distributed-executor-backend", "uni")
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    elif single.cuda:
        environment |= {"ENABLE_KVCACHED": "false", "KVCACHED_AUTOPATCH": "0"}
    if side.layout is not None:
        environment["VLLM_KV_CACHE_LAYOUT"] = side.layout
    dtype = CUDA_DTYPE if single.cuda else single.dtype
    spec = small_engine(
        name, model, dtype, arguments, connector, kvpatch, tuple(environment.items())
    )
    return replace(spec, python=python_of(side.release))
