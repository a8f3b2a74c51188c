"""The table of unlike pairs: which engines each row is made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpatch.verify.engine import EngineSpec
from kvpatch.verify.setups import BadOptions, Setup, small_engine

DTYPE = "float32"
"""vLLM's CPU backend keeps keys by column in it on every x86 machine; in bfloat16 it may not."""

_TORCH_ATTENTION = (
    "--worker-extension-cls",
    "kvpatch.verify.torch_attention.TorchCacheProbe",
)


@dataclass(frozen=True)
class Side:
    """One engine of a row.

    Attributes:
        layout: NHD or HND; None where the backend has one only.
    """

    block_tokens: int
    ranks: int = 1
    layout: str | None = None

    def __str__(self) -> str:
        parts = [str(self.block_tokens)]
        if self.ranks > 1:
            parts.append(f"TP{self.ranks}")
        if self.layout:
            parts.append(self.layout)
        return " ".join(parts)


@dataclass(frozen=True)
class Single:
    """What the single engine and every engine of a row have in common."""

    model: str = "llama"
    torch_attention: bool = False

    def __str__(self) -> str:
        return f"{self.model}, attention in torch" if self.torch_attention else self.model


@dataclass(frozen=True)
class Row:
    """One pair, or several prefill engines with one decode engine."""

    name: str
    prefill: tuple[Side, ...]
    decode: Side
    single: Single = Single()

    def __str__(self) -> str:
        kind = "" if self.single.model == "llama" else f", {self.single.model}"
        return f"{' + '.join(map(str, self.prefill))} -> {self.decode}{kind}"

    @property
    def same_prefill(self) -> bool:
        """Whether prefill engines compute as the single engine does, to the last bit."""
        return all(side.ranks == 1 for side in self.prefill)


_WINDOW = Single(model="window")
_ROWS = Single(torch_attention=True)

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
)


def choose(text: str | None) -> tuple[Row, ...]:
    """``"128-32,2p1d"`` -> these rows in the order of the table; all of them for None.

    Raises:
        BadOptions: an unknown name, or none.
    """
    if text is None:
        return ROWS
    asked = {name.strip() for name in text.split(",") if name.strip()}
    known = {row.name for row in ROWS}
    if not asked or asked - known:
        names = ", ".join(row.name for row in ROWS)
        raise BadOptions(f"--rows: expected some of {names}, found {text!r}")
    return tuple(row for row in ROWS if row.name in asked)


def by_single(rows: Sequence[Row]) -> dict[Single, list[Row]]:
    """The rows that are held against one and the same single engine."""
    grouped: dict[Single, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.single, []).append(row)
    return grouped


def single_setup(single: Single, model: str) -> Setup:
    """The engine that computes alone."""
    name = f"single-{single.model}" + ("-torch" if single.torch_attention else "")
    return Setup("single", (_engine(name, single, Side(32), model, connector=False),))


def row_setups(row: Row, model: str) -> tuple[Setup, Setup]:
    """The set-ups ``stock`` and ``kvpatch``, on the same prefill engines without kvpatch."""
    prefill = tuple(
        _engine(f"{row.name}-prefill-{number}", row.single, side, model)
        for number, side in enumerate(row.prefill)
    )
    stock = _engine(f"{row.name}-decode-stock", row.single, row.decode, model)
    patched = _engine(f"{row.name}-decode-kvpatch", row.single, row.decode, model, kvpatch=True)
    return Setup("stock", prefill, (stock,)), Setup("kvpatch", prefill, (patched,))


def _engine(
    name: str,
    single: Single,
    side: Side,
    model: str,
    connector: bool = True,
    kvpatch: bool = False,
) -> EngineSpec:
    arguments: tuple[str, ...] = ("--block-size", str(side.block_tokens))
    if side.ranks > 1:
        arguments += ("--tensor-parallel-size", str(side.ranks))
    if single.torch_attention:
        arguments += _TORCH_ATTENTION
    environment: Mapping[str, str] = (
        {"VLLM_KV_CACHE_LAYOUT": side.layout} if side.layout is not None else {}
    )
    return small_engine(
        name, model, DTYPE, arguments, connector, kvpatch, tuple(environment.items())
    )
