"""What a good load looks like from a peer, learnt from its first loads, and what does not.

A distance is that of the key, or value, that P sent for a prompt's last token from the one that D
computes for it: the norm of the difference by the larger of the two norms. Kernels of one engine
differ a little from those of another, and from themselves in another batch, so that a good load's
distances are small and not nothing. How small they are nobody knows before it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Distances = npt.NDArray[np.float64]

#: Of a peer, before anything of it is an alarm.
CALIBRATION_LOADS = 64
#: A load that is so far off is left out of what is learnt, where others are not near it.
_STRANGE_DISTANCE = 0.2
_STRANGE_RATIO = 8.0
#: Beyond the farthest good load.
LOG_MARGIN = 2.0
ENFORCE_MARGIN = 4.0
#: Of types whose rounding alone is less than that.
_LEAST_FLOOR = 1e-5


class Excess(NamedTuple):
    """The distance that is farthest beyond its threshold.

    Attributes:
        beyond: all planes whose distance is.
    """

    plane: int
    distance: float
    threshold: float
    beyond: frozenset[int]


@dataclass
class Calibration:
    """Of one peer: at first its loads' distances, then what was learnt from them.

    Attributes:
        floor: what rounding to the cache's type makes of a good load.
        loads: that were looked at so far.
        left_out: of those that were learnt from, how many were too strange to.
        limits: by plane the farthest good load; None before it is calibrated.
    """

    planes: int
    floor: float
    loads: int = 0
    left_out: int = 0
    limits: Distances | None = None
    _samples: list[Distances] = field(default_factory=list)

    def learn(self, distances: Distances) -> bool:
        """Takes a load's distances, by plane; says whether that has made it calibrated."""
        self.loads += 1
        if self.limits is not None:
            return False
        self._samples.append(distances)
        if len(self._samples) < CALIBRATION_LOADS:
            return False
        self.limits, self.left_out = learnt(np.stack(self._samples), self.floor)
        self._samples = []
        return True

    def excess(self, distances: Distances, margin: float) -> Excess | None:
        """What is beyond the margin; None where nothing is, and before it is calibrated."""
        return None if self.limits is None else farthest(distances, self.limits * margin)


def floor_of(epsilon: float) -> float:
    """What a good load may differ by whatever was learnt.

    Args:
        epsilon: from 1 to the next number of the cache's type.
    """
    return max(epsilon, _LEAST_FLOOR)


def learnt(samples: Distances, floor: float) -> tuple[Distances, int]:
    """By plane the farthest of the good ones among [load, plane], and how many were no good ones.

    A load is none that differs much in a plane where most loads do not: one bad load among those
    that are learnt from must not hide the next one.
    """
    known = np.where(np.isfinite(samples), samples, np.inf)
    usual = np.maximum(np.median(known, axis=0), floor)
    is_strange = (known > _STRANGE_DISTANCE) & (known > _STRANGE_RATIO * usual)
    is_good = ~is_strange.any(axis=1) & np.isfinite(known).all(axis=1)
    good = known[is_good]
    limits = np.maximum(good.max(axis=0, initial=0.0), floor)
    return limits, int((~is_good).sum())


def farthest(distances: Distances, thresholds: Distances) -> Excess | None:
    """The one that is most times its threshold; None where none is beyond it.

    What is no number is as far as can be.
    """
    known = np.where(np.isnan(distances), np.inf, distances)
    plane = int(np.argmax(known / thresholds))
    distance, threshold = float(known[plane]), float(thresholds[plane])
    if distance <= threshold:
        return None
    return Excess(
        plane, distance, threshold, frozenset(np.flatnonzero(known > thresholds).tolist())
    )
