"""Adapters that requests choose among, on one base: who has which place among the parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from itertools import count

from aspd_jax.errors import RequestError
from aspd_jax.formats.adapter import open_adapter
from aspd_jax.language_model import LanguageModel, put_adapter


class Adapters:
    """Names and places of adapters.

    Every adapter that is put gets a number of its own, which requests keep: one that was asked for by its name is that
    adapter to the end, whatever the name means later. Its place is given away when nobody uses it any more.

    Args:
        lm: loaded with room for adapters, or without.
        in_use: numbers of the adapters of all requests that have not ended.
    """

    def __init__(self, lm: LanguageModel, in_use: Callable[[], Collection[int]]) -> None:
        self._lm, self._in_use = lm, in_use
        self._places = [0] * lm.config.adapters  # the number of the adapter in each; 0: none
        self._names: dict[str, int] = {}
        self._numbers = count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """That requests may ask for."""
        return tuple(self._names)

    def number(self, name: str) -> int:
        """Of an adapter, by its name; 0 of no name.

        Raises:
            RequestError: there is none of this name.
        """
        if name and name not in self._names:
            raise RequestError(f"there is no adapter {name!r}; there are {', '.join(self._names) or 'none'}")
        return self._names[name] if name else 0

    def there(self, number: int) -> bool:
        """Whether an adapter has a place, or is none."""
        return not number or number in self._places

    def place(self, number: int) -> int:
        """Of an adapter that is there, among the parameters, from 0; -1 of no adapter."""
        return self._places.index(number) if number else -1

    def put(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Let requests ask for an adapter, in the place of one that is not used.

        Raises:
            CheckpointError: the folder holds no adapter for this model.
            RequestError: the name is taken, or all places are.
        """
        if not name or name in self._names:
            raise RequestError(f"an adapter needs a name that none has, got {name!r}")
        kept = {*self._names.values(), *self._in_use()}
        free = [place for place, number in enumerate(self._places) if not number or number not in kept]
        if not free:
            raise RequestError(f"all {len(self._places)} places for adapters are taken; remove one first")
        put_adapter(self._lm, free[0], open_adapter(folder))
        self._names[name] = self._places[free[0]] = next(self._numbers)

    def remove(self, name: str) -> None:
        """Let no further request ask for an adapter; those that have asked for it keep it.

        Raises:
            RequestError: there is none of this name.
        """
        self.number(name)
        if not name:
            raise RequestError("an adapter to remove needs a name")
        del self._names[name]
