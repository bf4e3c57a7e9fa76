"""Adapters that requests select, on one base model: their names, and their slots in the parameters."""

from __future__ import annotations

import os
from itertools import count

from aspd_jax.errors import RequestError
from aspd_jax.formats.adapter import open_adapter
from aspd_jax.language_model import LanguageModel, put_adapter


class AdapterSlots:
    """Names and slots of adapters.

    Every adapter that is put gets a new number, which requests keep: a request uses the adapter that its name meant at
    submission, whatever the name means later. A slot is free when neither a name nor a request uses it.

    Args:
        lm: the model; `LanguageModel.config.adapters` is the number of slots.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._slots = [0] * lm.config.adapters  # number of the adapter in each slot; 0: none
        self._names: dict[str, int] = {}
        self._numbers = count(1)
        self._tagged: set[int] = set()  # numbers of the adapters that were trained with tags
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
            expected = ", ".join(map(repr, self._names))
            raise RequestError(
                f"adapter: expected one of {expected}, got {name!r}"
                if expected
                else f"adapter: expected the base model, got {name!r}; loaded: none"
            )
        return self._names[name] if name else 0

    def tagged(self, name: str) -> bool:
        """Return whether the model with this adapter was trained with tags; for errors see `number`."""
        return self._lm.tagged or self.number(name) in self._tagged

    def loaded(self, number: int) -> bool:
        """Return whether an adapter has a slot; true for 0."""
        return not number or number in self._slots

    def slot(self, number: int) -> int:
        """Return the slot of a loaded adapter, from 0; -1 for the base model."""
        return self._slots.index(number) if number else -1

    def acquire(self, number: int) -> None:
        """Reserve the slot of an adapter for a request, until `release`.

        Raises:
            RequestError: the adapter has no slot any more.
        """
        if not self.loaded(number):
            raise RequestError("adapter: expected a loaded one, got one that was replaced. Check the request again.")
        self._users.append(number)

    def release(self, number: int) -> None:
        """Release the slot that `acquire` reserved."""
        self._users.remove(number)

    def put(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter into a free slot; requests select it by its name.

        Raises:
            CheckpointError: the folder holds no adapter for this model.
            RequestError: the name is taken, or no slot is free.
        """
        if not name or name in self._names:
            raise RequestError(f"name: expected a name that no loaded adapter has, got {name!r}")
        used = {*self._names.values(), *self._users}
        free = [slot for slot, number in enumerate(self._slots) if not number or number not in used]
        if not free:
            raise RequestError(
                f"adapter slots: expected a free one, got {len(self._slots)} in use. Remove an adapter first."
            )
        adapter = open_adapter(folder)
        put_adapter(self._lm, free[0], adapter)
        number = next(self._numbers)
        if "positions" in adapter.settings:
            self._tagged.add(number)
        self._names[name] = self._slots[free[0]] = number  # last: other threads select it from here on

    def remove(self, name: str) -> None:
        """Remove the name of an adapter; requests that selected it keep it.

        Raises:
            RequestError: the name is unknown.
        """
        self.number(name)
        if not name:
            raise RequestError("name: expected a name, got none")
        del self._names[name]
