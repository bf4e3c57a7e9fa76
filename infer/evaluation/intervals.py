"""Means with intervals, and whether a difference could be chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 9999
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean with its bootstrap interval (95 %, percentile), over how many values."""

    mean: float
    low: float
    high: float
    values: int


class Difference(NamedTuple):
    """Of pairs: mean difference with its interval, and the p-value of a two-sided permutation test of its sign."""

    mean: float
    low: float
    high: float
    p: float
    values: int


def interval(values: Sequence[float]) -> Interval:
    """The mean of some values; of one value or of equal ones, no width."""
    array = np.asarray(values, float)
    if array.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    mean = float(array.mean())
    if array.size < 2 or np.ptp(array) == 0:
        return Interval(mean, mean, mean, int(array.size))
    found = stats.bootstrap(
        (array,), np.mean, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", rng=0
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high), int(array.size))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Of pairs of values, ours less theirs."""
    gaps = np.asarray(ours, float) - np.asarray(theirs, float)
    of = interval(gaps.tolist())
    if gaps.size < 2 or not gaps.any():
        return Difference(*of[:3], 1.0, of.values)
    test = stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=0)
    return Difference(*of[:3], float(test.pvalue), of.values)
