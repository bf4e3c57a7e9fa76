"""Means and ratios with bootstrap intervals, and permutation tests of differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    return _bootstrap(np.mean, array, constant=bool(np.ptp(array) == 0))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the total of `ours` divided by that of `theirs` over pairs of values, with its interval."""
    first, second = np.asarray([ours, theirs], float)
    return _bootstrap(_ratio, first, second, constant=first.size < 2 or bool(np.ptp(first / second) == 0))


def _ratio(ours: np.ndarray, theirs: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.asarray(ours.sum(axis) / theirs.sum(axis))


def _bootstrap(statistic: Callable[..., Any], *samples: np.ndarray, constant: bool) -> Interval:
    """Return a statistic of paired samples with its interval, which has width 0 if all values are equal."""
    whole, values = float(statistic(*samples)), samples[0].size
    if values < 2 or constant:
        return Interval(whole, whole, whole, values)
    bounds = stats.bootstrap(
        samples, statistic, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", paired=True, rng=0
    ).confidence_interval
    return Interval(whole, float(bounds.low), float(bounds.high), values)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return the mean of `ours` minus `theirs` over pairs of values."""
    gaps = np.asarray(ours, float) - np.asarray(theirs, float)
    mean = interval(gaps.tolist())
    if gaps.size < 2 or not gaps.any():
        return Difference(*mean[:3], 1.0, mean.values)
    test = stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=0)
    return Difference(*mean[:3], float(test.pvalue), mean.values)
