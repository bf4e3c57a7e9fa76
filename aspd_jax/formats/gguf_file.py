"""GGUF files as metadata and tensors: header, key-value pairs and tensor descriptions.

The `gguf` library has a reader, too, which makes NumPy views for every string; a vocabulary of 262,144 tokens takes it
ten seconds. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

from aspd_jax.errors import CheckpointError
from aspd_jax.formats.hf_config import FLAG, ID, SIZE, TEXT, Kind
from aspd_jax.formats.side_files import check_content

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, unless the file has `general.alignment`
MAX_DIMENSIONS = 4
DEQUANTISED = 1 << 18  # values at a time: intermediate arrays of whole embeddings do not fit a processor's cache
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
NUMBERS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}

TEXTS = Kind("a list of strings", lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v))
LIST = Kind("a list of numbers", lambda v: isinstance(v, list) and all(isinstance(i, (int, float)) for i in v))
# Kinds of keys that do not begin with the architecture.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("split.no", "split.count", "split.tensors.count"), SIZE),
    **dict.fromkeys(("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"), TEXT),
    "tokenizer.chat_template": TEXT,
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_templates"), TEXTS),
    **dict.fromkeys(("tokenizer.ggml.token_type", "tokenizer.ggml.scores"), LIST),
    **dict.fromkeys(("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"), FLAG),
}
TOKEN_ID = "_token_id"  # suffix of keys with a token id
TEMPLATE = "tokenizer.chat_template."  # prefix of keys with a named chat template


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file, not yet dequantised.

    Attributes:
        path: path of the file.
        name: name in the file.
        kind: quantisation.
        shape: shape, outputs first; the file has the reverse order.
        data: bytes of its rows, uint8, mapped from the file.
    """

    path: Path
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def values(self) -> np.ndarray:
        """Return the values in float32.

        Raises:
            CheckpointError: the `gguf` library does not support the quantisation.
        """
        rows = self.data.reshape(-1, self.data.shape[-1])
        values = np.empty((len(rows), self.shape[-1]), np.float32)
        count = max(1, DEQUANTISED // self.shape[-1])
        try:
            for start in range(0, len(rows), count):
                values[start : start + count] = dequantize(rows[start : start + count], self.kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: {self.name}: expected Q4_0 to Q8_0, Q2_K to Q6_K, IQ, F16, BF16 or F32, "
                f"got {self.kind.name}"
            ) from None
        return values.reshape(self.shape)


class Metadata:
    """Values of a GGUF file by key: numbers, bools, strings, and lists of these.

    A single float32 number is the shortest decimal: 1e-06 instead of 9.999999974752427e-07.

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


def open_gguf_file(path: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
    """Read the metadata of a GGUF file, and its tensor descriptions by name.

    Raises:
        CheckpointError: the file is truncated, broken, or in another format.
    """
    check_content(path, "a GGUF file")
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _broken(path, str(error)) from None
    if data[: len(MAGIC)] != MAGIC:
        raise _broken(path, "no GGUF header")
    return _Reader(path, data).read()


def _broken(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: expected a GGUF file, got a truncated file or another format ({problem})")


class _Reader:
    """Parser of one file. All lengths are compared with the size of the file before they are used.

    Args:
        path: path of the file, for messages.
        data: contents of the file.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place = path, data, len(MAGIC)

    def read(self) -> tuple[Metadata, dict[str, GgufTensor]]:
        """Return the metadata and the tensors of the file."""
        version = self.number(U32)
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.path}: expected little-endian numbers, got big-endian ones. "
                "Convert the file with gguf's convert_endian."
            )
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path}: expected GGUF version 2 or 3, got {version}")
        tensors, pairs = self.number(U64), self.number(U64)
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.name()
            if key in values:
                raise _broken(self.path, f"two values of {key!r}")
            values[key] = self.value(key)
        descriptions = [self.description() for _ in range(tensors)]
        alignment = values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _broken(self.path, f"general.alignment {alignment!r}")
        start = -(-self.place // alignment) * alignment
        opened: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in descriptions:
            if name in opened:
                raise _broken(self.path, f"two tensors {name!r}")
            opened[name] = self.tensor(name, shape, kind, start + offset)
        return Metadata(self.path, values), opened

    def take(self, size: int) -> int:
        """Return the place of the next `size` bytes, and move behind them."""
        place = self.place
        if size > len(self.data) - place:
            raise _broken(self.path, f"{size} bytes at {place} of {len(self.data)}")
        self.place = place + size
        return place

    def number(self, form: struct.Struct) -> int:
        """Read an unsigned number."""
        return int(form.unpack_from(self.data, self.take(form.size))[0])

    def text(self) -> bytes:
        """Read a string."""
        size = self.number(U64)
        place = self.take(size)
        return self.data[place : place + size]

    def name(self) -> str:
        """Read a string that names a key or a tensor."""
        name = self.text()
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise _broken(self.path, f"name {name[:60]!r}") from None

    def kind(self, key: str) -> GGUFValueType:
        """Read the type of a value."""
        number = self.number(U32)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(f"{self.path}: {key}: expected a type of GGUF, got number {number}") from None

    def value(self, key: str) -> Any:
        """Read a value with its type."""
        kind = self.kind(key)
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            (number,) = self.numbers(kind, 1)
            return float(str(np.float32(number))) if kind == GGUFValueType.FLOAT32 else number
        kind, count = self.kind(key), self.number(U64)
        if kind == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: {key}: expected a list of numbers or strings, got a list of lists")
        return self.texts(count) if kind == GGUFValueType.STRING else self.numbers(kind, count)

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        """Read numbers of one type."""
        form = np.dtype(NUMBERS[kind])
        numbers = np.frombuffer(self.data, form, count, self.take(count * form.itemsize))
        if kind == GGUFValueType.BOOL:
            return (numbers != 0).tolist()
        return numbers.tolist()

    def texts(self, count: int) -> list[bytes]:
        """Read strings. This is the inner loop of large vocabularies."""
        data, place, end, unpack = self.data, self.place, len(self.data), U64.unpack_from
        texts: list[bytes] = []
        for _ in range(count):
            start = place + U64.size
            if start > end:
                raise _broken(self.path, f"{len(texts)} of {count} strings")
            place = start + unpack(data, place)[0]
            if place > end:
                raise _broken(self.path, f"{len(texts)} of {count} strings")
            texts.append(data[start:place])
        self.place = place
        return texts

    def description(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read name, shape, quantisation and offset of a tensor."""
        name = self.name()
        dimensions = self.number(U32)
        if dimensions > MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self.path}: {name}: expected at most {MAX_DIMENSIONS} dimensions, got {dimensions}"
            )
        shape = tuple(self.number(U64) for _ in range(dimensions))
        return name, shape[::-1], self.number(U32), self.number(U64)

    def tensor(self, name: str, shape: tuple[int, ...], number: int, place: int) -> GgufTensor:
        """Return a tensor at a place in the file."""
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(f"{self.path}: {name}: expected a known quantisation, got number {number}") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: {name}: expected rows of a multiple of {block} values, got the shape {list(shape)}"
            )
        byte_shape = (*shape[:-1], shape[-1] // block * size)
        end = place + prod(byte_shape)
        if end > len(self.data):
            raise _broken(self.path, f"{name} ends at {end} of {len(self.data)} bytes")
        data = np.frombuffer(self.data, np.uint8, end - place, place)
        return GgufTensor(self.path, name, kind, shape, data.reshape(byte_shape))
