"""Metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aspd_jax.errors import CheckpointError
from aspd_jax.formats.hf_config import FLAG, ID, SIZE, TEXT, Kind

TEXTS = Kind("a list of strings", lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v))
NUMBERS = Kind("a list of numbers", lambda v: isinstance(v, list) and all(isinstance(i, (int, float)) for i in v))
# Kinds of keys that do not begin with the architecture.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("split.no", "split.count", "split.tensors.count"), SIZE),
    **dict.fromkeys(("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"), TEXT),
    "tokenizer.chat_template": TEXT,
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_templates"), TEXTS),
    **dict.fromkeys(("tokenizer.ggml.token_type", "tokenizer.ggml.scores"), NUMBERS),
    **dict.fromkeys(("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"), FLAG),
}
TOKEN_ID = "_token_id"  # suffix of keys with a token id
TEMPLATE = "tokenizer.chat_template."  # prefix of keys with a named chat template


class Metadata:
    """Values of a GGUF file by key.

    Args:
        path: path of the file, for messages.
        values: values by key, with strings as bytes.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values
        self._read: dict[str, Any] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of all values."""
        return list(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or a default.

        Raises:
            CheckpointError: the value has the wrong kind.
        """
        if key not in self._values:
            return default
        if key not in self._read:
            value = self._values[key]
            try:
                if isinstance(value, list):
                    value = [item.decode() if isinstance(item, bytes) else item for item in value]
                elif isinstance(value, bytes):
                    value = value.decode()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self.path}: {key}: expected text in UTF-8, got {error}") from None
            kind = ID if key.endswith(TOKEN_ID) else TEXT if key.startswith(TEMPLATE) else KINDS.get(key)
            if kind is not None and not kind.accepts(value):
                raise CheckpointError(f"{self.path}: {key}: expected {kind.expected}, got {str(value)[:80]}")
            self._read[key] = value
        return self._read[key]

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key.

        Raises:
            CheckpointError: the key is missing.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path}: expected a GGUF model with {key!r}, got none")
        return value
