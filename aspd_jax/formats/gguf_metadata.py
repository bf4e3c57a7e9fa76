"""What a GGUF file says beside its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from aspd_jax.errors import CheckpointError


class Metadata:
    """Values of a GGUF file by key."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._fields = reader.fields
        self._read: dict[str, Any] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of all values."""
        return list(self._fields)

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default where the file has none."""
        if key not in self._fields:
            return default
        if key not in self._read:
            value = self._fields[key].contents()
            # float32 in the file: the shortest number that it stands for, 1e-06 and not 9.999999974752427e-07
            self._read[key] = float(str(np.float32(value))) if isinstance(value, float) else value
        return self._read[key]

    def __getitem__(self, key: str) -> Any:
        """A value.

        Raises:
            CheckpointError: the file has none.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no {key!r}; it is not a complete GGUF model")
        return value
