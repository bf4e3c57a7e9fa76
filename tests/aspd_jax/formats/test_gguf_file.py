"""The reader of GGUF files against the reader of the `gguf` library, and with broken files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFEndian,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    dequantize,
    quantize,
)
from hypothesis import given
from hypothesis import strategies as st

from aspd_jax.errors import CheckpointError
from aspd_jax.formats.gguf_file import open_gguf_file

SIZES = {
    **{GGUFValueType[f"{sign}INT{bits}"]: (sign, bits) for sign in ("", "U") for bits in (8, 16, 32, 64)},
}


def numbers(kind: GGUFValueType) -> st.SearchStrategy[Any]:
    """Values of a type that is no list."""
    if kind in SIZES:
        sign, bits = SIZES[kind]
        low, high = (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return st.integers(low, high)
    if kind == GGUFValueType.BOOL:
        return st.booleans()
    if kind == GGUFValueType.STRING:
        return st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
    return st.floats(width=32 if kind == GGUFValueType.FLOAT32 else 64, allow_nan=False)


SINGLE = [kind for kind in GGUFValueType if kind != GGUFValueType.ARRAY]
VALUES = st.sampled_from(SINGLE).flatmap(
    lambda kind: st.one_of(
        st.tuples(st.just(kind), numbers(kind), st.none()),
        st.tuples(st.just(GGUFValueType.ARRAY), st.lists(numbers(kind), min_size=1, max_size=5), st.just(kind)),
    )
)


def write(
    file: Path, values: dict[str, tuple[Any, Any, Any]], tensors: dict[str, np.ndarray], endian: Any = GGUFEndian.LITTLE
) -> Path:
    """Write a file with the `gguf` library; values are (type, value, type of elements)."""
    writer = GGUFWriter(file, "llama", endianess=endian)
    for key, (kind, value, sub_type) in values.items():
        writer.add_key_value(key, value, kind, sub_type=sub_type)
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType.Q8_0 if tensor.shape[-1] % 32 == 0 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


TENSORS = {
    "token_embd.weight": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32),
    "output_norm.weight": np.arange(5, dtype=np.float32),
    "blk.0.x": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with a vocabulary."""
    values = {
        "tokens": (GGUFValueType.ARRAY, ["a", "ä", "<s>"], GGUFValueType.STRING),
        "scores": (GGUFValueType.ARRAY, [1.0, 2.5, -3.0], GGUFValueType.FLOAT32),
        "eps": (GGUFValueType.FLOAT32, 1e-6, None),
    }
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf", values, TENSORS).read_bytes()


@given(values=st.dictionaries(st.text("abc._", min_size=1, max_size=6), VALUES, max_size=5))
def test_values_and_tensors_are_those_of_the_library(values: dict[str, Any], tmp_path_factory: Any) -> None:
    file = write(tmp_path_factory.mktemp("gguf") / "a.gguf", values, TENSORS)
    (metadata, tensors), theirs = open_gguf_file(file), GGUFReader(file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert metadata.keys == list(fields)
    for key, value in fields.items():
        ours = metadata.get(key)
        if values.get(key, (None,))[0] == GGUFValueType.FLOAT32:  # the shortest decimal of the number
            assert np.float32(ours) == np.float32(value) and len(str(ours)) <= len(str(value))
        else:
            assert ours == value and type(ours) is type(value)
    assert list(tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = tensors[tensor.name]
        assert own.shape == tuple(tensor.shape[::-1]) == TENSORS[tensor.name].shape
        np.testing.assert_array_equal(own.values(), dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("at_a_time", [1, 64, 150])
def test_values_do_not_depend_on_the_rows_dequantised_at_a_time(
    at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = np.random.default_rng(1).standard_normal((5, 3, 64)).astype(np.float32)
    file = write(tmp_path / "a.gguf", {}, {"x": expected})
    monkeypatch.setattr("aspd_jax.formats.gguf_file.DEQUANTISED", at_a_time)
    (tensor,) = GGUFReader(file).tensors
    values = open_gguf_file(file)[1]["x"].values()
    np.testing.assert_array_equal(values, dequantize(tensor.data, tensor.tensor_type))
    assert values.shape == expected.shape and np.abs(values - expected).max() < 0.05


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_NL"])
def test_blocks_of_published_files_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    """Check the quantisations of which the library writes none, Q4_K_M's among them, with random blocks."""
    kind = GGMLQuantizationType[name]
    count, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(2).integers(0, 60, (3, 512 // count * size), np.uint8)  # no scale is infinite
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("x", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf_file(tmp_path / "a.gguf")[1]["x"]
    assert tensor.shape == (3, 512) and np.ptp(tensor.values()) > 0
    np.testing.assert_array_equal(tensor.values(), dequantize(blocks, kind))


def test_every_quantisation_has_a_size() -> None:
    assert set(GGMLQuantizationType) == set(GGML_QUANT_SIZES)


def opens(file: Path, content: bytes) -> bool:
    """Return whether a file with this content opens, or is refused without its name; other errors fail the test."""
    file.write_bytes(content)
    try:
        metadata, tensors = open_gguf_file(file)
        for key in metadata.keys:
            metadata.get(key)
        for tensor in tensors.values():
            with np.errstate(all="ignore"):
                tensor.values()
    except CheckpointError as error:
        return str(file) not in str(error)
    return True


def test_a_file_that_ends_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    assert opens(tmp_path / "a.gguf", whole)
    padding = len(whole) - len(whole.rstrip(b"\0"))
    for end in range(len(whole) - padding):
        assert not opens(tmp_path / "a.gguf", whole[:end]), end


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_open_or_are_refused(whole: bytes, tmp_path_factory: Any, changes: list[tuple[int, int]]) -> None:
    content = bytearray(whole)
    for place, byte in changes:
        content[4 + place % (len(content) - 4)] = byte
    opens(tmp_path_factory.mktemp("gguf") / "a.gguf", bytes(content))


def header(*, version: int = 3, tensors: int = 0, pairs: int = 1, rest: bytes = b"") -> bytes:
    """Return a file from its numbers."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def value(kind: int, *parts: bytes) -> bytes:
    """Return a value with the key `k`."""
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + b"".join(parts)


def description(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    """Return the description of a tensor named `t`."""
    form = f"<Q1sI{len(shape)}QIQ"
    return struct.pack(form, 1, b"t", len(shape), *shape, kind, offset)


HUGE = 2**63


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(version=1), "expected GGUF version 2 or 3, got 1"),
        (header(pairs=HUGE), "truncated file"),
        (header(pairs=0, tensors=HUGE), "truncated file"),
        (header(rest=value(8, struct.pack("<Q", HUGE))), "truncated file"),
        (
            header(rest=value(9, struct.pack("<IQ", 8, HUGE), b"\0" * 64)),
            "truncated file .* of 9223372036854775808 str",
        ),
        (header(rest=value(9, struct.pack("<IQ", 5, HUGE))), "truncated file"),
        (header(rest=value(9, struct.pack("<IQ", 9, 1))), "k: expected a list of numbers or strings, got a list of"),
        (header(rest=value(13)), "k: expected a type of GGUF, got number 13"),
        (header(pairs=2, rest=value(7, b"\1") * 2), "two values of 'k'"),
        (header(pairs=0, tensors=2, rest=description(1) * 2 + b"\0" * 64), "two tensors 't'"),
        (header(pairs=0, tensors=1, rest=description(HUGE, HUGE)), "t ends at"),
        (header(pairs=0, tensors=1, rest=description(4, offset=HUGE)), "t ends at"),
        (header(pairs=0, tensors=1, rest=description(4, 0)), r"t: expected rows .*, got the shape \[0, 4\]"),
        (header(pairs=0, tensors=1, rest=description(31, kind=8)), r"a multiple of 32 values, got the shape \[31\]"),
        (header(pairs=0, tensors=1, rest=description(1, 1, 1, 1, 1)), "t: expected at most 4 dimensions, got 5"),
        (header(pairs=0, tensors=1, rest=description(4, kind=99)), "t: expected a known quantisation, got number 99"),
        (b"GGUF", "truncated file"),
        (b"", "empty file"),
    ],
)
def test_broken_files_are_described(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.gguf.*{message}"):
        open_gguf_file(tmp_path / "a.gguf")


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected little-endian numbers, got big-endian ones"):
        open_gguf_file(write(tmp_path / "a.gguf", {}, {}, GGUFEndian.BIG))


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(header(rest=value(8, struct.pack("<Q", 1), b"\xff")))
    metadata, _ = open_gguf_file(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="k: expected text in UTF-8"):
        metadata.get("k")
