"""Means and ratios with bootstrap intervals, and permutation tests of differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 9999
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean or ratio with its bootstrap interval (95 %, percentile) and the number of values."""

    mean: float
    low: float
    high: float
    values: int


class Difference(NamedTuple):
    """Mean difference of pairs with its interval, and the p-value of a two-sided sign permutation test."""

    mean: float
    low: float
    high: float
    p: float
    values: int


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values with its interval, which has width 0 for one value or equal values."""
    array = np.asarray(values, float)
    if array.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    mean = float(array.mean())
    if array.size < 2 or np.ptp(array) == 0:
        return Interval(mean, mean, mean, int(array.size))
    bounds = stats.bootstrap(
        (array,), np.mean, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", rng=0
    ).confidence_interval
    return Interval(mean, float(bounds.low), float(bounds.high), int(array.size))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the total of `ours` divided by that of `theirs` over pairs of values, with its interval."""
    pairs = np.asarray([ours, theirs], float)
    whole = float(pairs[0].sum() / pairs[1].sum())
    if pairs.shape[1] < 2 or np.ptp(pairs[0] / pairs[1]) == 0:
        return Interval(whole, whole, whole, pairs.shape[1])
    bounds = stats.bootstrap(
        tuple(pairs), _ratio, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", paired=True, rng=0
    ).confidence_interval
    return Interval(whole, float(bounds.low), float(bounds.high), pairs.shape[1])


def _ratio(ours: np.ndarray, theirs: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.asarray(ours.sum(axis) / theirs.sum(axis))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return the mean of `ours` minus `theirs` over pairs of values."""
    gaps = np.asarray(ours, float) - np.asarray(theirs, float)
    mean = interval(gaps.tolist())
    if gaps.size < 2 or not gaps.any():
        return Difference(*mean[:3], 1.0, mean.values)
    test = stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=0)
    return Difference(*mean[:3], float(test.pvalue), mean.values)
