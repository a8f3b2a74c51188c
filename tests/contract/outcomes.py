"""docs/pictures/outcomes.svg: what became of every heterogeneous pair on every release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvpatch.core.releases import RELEASES
from tests.lab import table
from tests.lab.case import Outcome

from .tables import ROOT

PICTURE = ROOT / "docs" / "pictures" / "outcomes.svg"

_COLOURS: dict[Outcome, tuple[str, str]] = {
    "identical": ("#2f855a", "identical"),
    "refused": ("#a0aec0", "refused"),
    "failed": ("#4a5568", "not completed"),
    "corrupt": ("#c53030", "wrong tokens, no error"),
}
_COLUMN, _BAR, _HEIGHT, _LEFT, _GAP = 19, 16, 110, 8, 34
_WIDTH = 2 * _LEFT + _COLUMN * len(RELEASES)
_TOTAL = 2 * (_HEIGHT + _GAP) + 76


def picture() -> str:
    """The whole file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_TOTAL}" width="{_WIDTH}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_TOTAL}" fill="#ffffff"/>',
    ]
    cells = table.known_cells()
    for number, (title, side) in enumerate((("stock vLLM", "stock"), ("kvpatch on D", "kvpatch"))):
        top = _GAP + number * (_HEIGHT + _GAP)
        parts.append(f'<text x="{_LEFT}" y="{top - 9}" font-size="14">{title}</text>')
        for release in RELEASES:
            counts = Counter(getattr(cell, side) for cell in cells if cell.release == release)
            parts += _bar(release, counts, top)
    return "\n".join([*parts, *_releases(), *_legend(), "</svg>"]) + "\n"


def _bar(release: str, counts: Counter[Outcome], top: int) -> Iterator[str]:
    """One release's outcomes, from the bottom up."""
    bottom = float(top + _HEIGHT)
    for outcome, (colour, name) in _COLOURS.items():
        if counts[outcome]:
            height = _HEIGHT * counts[outcome] / counts.total()
            bottom -= height
            yield (
                f'<rect x="{_x(release)}" y="{bottom:.1f}" width="{_BAR}" height="{height:.1f}" '
                f'fill="{colour}"><title>{release}: {counts[outcome]} {name}</title></rect>'
            )


def _releases() -> Iterator[str]:
    """The names, upright below the bars."""
    y = 2 * (_HEIGHT + _GAP) + 4
    for release in RELEASES:
        x = _x(release) + 12
        yield f'<text x="{x}" y="{y}" font-size="10" transform="rotate(-90 {x} {y})" ' + (
            f'text-anchor="end">{release}</text>'
        )


def _legend() -> Iterator[str]:
    x = _LEFT
    for colour, name in _COLOURS.values():
        yield f'<rect x="{x}" y="{_TOTAL - 15}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 15}" y="{_TOTAL - 6}">{name}</text>'
        x += 120


def _x(release: str) -> int:
    return _LEFT + _COLUMN * RELEASES.index(release)
