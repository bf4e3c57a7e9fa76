"""Adapters that requests select, on one base model: their names, and their places among the parameters."""

from __future__ import annotations

import os
from itertools import count

from aspd_jax.errors import RequestError
from aspd_jax.formats.adapter import open_adapter
from aspd_jax.language_model import LanguageModel, put_adapter


class AdapterSlots:
    """Names and places of adapters.

    Every adapter that is put gets a new number, which requests keep: a request uses the adapter that its name meant at
    submission, whatever the name means later. A place is given away when neither a name nor a request uses it.

    Args:
        lm: the model; `LanguageModel.config.adapters` is the number of places.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._places = [0] * lm.config.adapters  # number of the adapter in each place; 0: none
        self._names: dict[str, int] = {}
        self._numbers = count(1)
        self._users: list[int] = []  # numbers of the adapters of all requests that have not ended

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests may select."""
        return tuple(self._names)

    def number(self, name: str) -> int:
        """Return the number of an adapter; 0 for an empty name.

        Raises:
            RequestError: the name is unknown.
        """
        if name and name not in self._names:
            raise RequestError(f"there is no adapter {name!r}; there are {', '.join(self._names) or 'none'}")
        return self._names[name] if name else 0

    def loaded(self, number: int) -> bool:
        """Return whether an adapter has a place; true for 0."""
        return not number or number in self._places

    def place(self, number: int) -> int:
        """Return the place of a loaded adapter among the parameters, from 0; -1 for the base model."""
        return self._places.index(number) if number else -1

    def acquire(self, number: int) -> None:
        """Keep the place of an adapter for a request, until `release`."""
        self._users.append(number)

    def release(self, number: int) -> None:
        """End what one call of `acquire` began."""
        self._users.remove(number)

    def put(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter into an unused place; requests select it by its name.

        Raises:
            CheckpointError: the folder holds no adapter for this model.
            RequestError: the name is taken, or all places are.
        """
        if not name or name in self._names:
            raise RequestError(f"an adapter needs a name that none has, got {name!r}")
        kept = {*self._names.values(), *self._users}
        free = [place for place, number in enumerate(self._places) if not number or number not in kept]
        if not free:
            raise RequestError(f"all {len(self._places)} places for adapters are taken; remove one first")
        put_adapter(self._lm, free[0], open_adapter(folder))
        self._names[name] = self._places[free[0]] = next(self._numbers)

    def remove(self, name: str) -> None:
        """Remove the name of an adapter; requests that selected it keep it.

        Raises:
            RequestError: the name is unknown.
        """
        self.number(name)
        if not name:
            raise RequestError("an adapter to remove needs a name")
        del self._names[name]
