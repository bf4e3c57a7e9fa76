"""GGUF files written with the `gguf` library in the form of llama.cpp's converter, and a real one if installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize
from safetensors.numpy import save_file

from aspd_jax import load_model
from aspd_jax.errors import CheckpointError
from aspd_jax.formats import open_checkpoint
from aspd_jax.formats.gguf import GEMMA_LAYERS, INSIDE_LAYERS, OUTSIDE_LAYERS, halves_of_heads
from tests.aspd_jax.model.test_model import logits_of
from tests.conftest import seeded_tensors, tiny_config, write_checkpoint
from tests.helpers.make_parity import GEMMA3, LLAMA3, QWEN2

KINDS = ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(7)]
GEMMA: dict[str, Any] = GEMMA3 | {
    "num_hidden_layers": 7,
    "layer_types": KINDS,
    "query_pre_attn_scalar": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "rope_theta": 1000.0,  # of the layers that see everything
}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
CASES = {
    "llama": tiny_config(hidden_size=64, num_attention_heads=4),
    "llama_tied": tiny_config(tie_word_embeddings=True),
    "llama_linear": tiny_config(rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "llama_llama3": tiny_config(
        hidden_size=128,
        rope_theta=500000.0,
        rope_scaling=LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
    ),
    "qwen2": tiny_config(**QWEN2),
    "qwen2_yarn": tiny_config(
        **QWEN2, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    ),
    "gemma3": tiny_config(**GEMMA),
    "qwen3": tiny_config(**QWEN3, head_dim=12, tie_word_embeddings=True),
}


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter puts rows of queries and keys of Llama models: pairs that are rotated
    together stand together.
    """
    half = len(rows) // heads // 2
    order = [head * 2 * half + pair + side * half for head in range(heads) for pair in range(half) for side in (0, 1)]
    return rows[order]


def write_gguf(
    file: Path, config: dict[str, Any], kind: GGMLQuantizationType = GGMLQuantizationType.F32, **changes: Any
) -> Path:
    """A GGUF file of the seeded tiny model that `write_checkpoint` writes as a folder; `write` adds to it."""
    family, heads = config["model_type"].removesuffix("_text"), config["num_attention_heads"]
    writer = GGUFWriter(file, changes.get("architecture", family))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_string(f"{family}.rope.scaling.type", scaling["rope_type"])
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if scaling.get("rope_type") == "llama3":
        size = config["hidden_size"] // heads
        plain = 1 / config["rope_theta"] ** (np.arange(0, size, 2) / size)
        writer.add_tensor("rope_freqs.weight", (plain / llama3_frequencies(plain, scaling)).astype(np.float32))
    writer.add_eos_token_id(0)
    changes.get("write", lambda writer: None)(writer)
    inside = INSIDE_LAYERS | (GEMMA_LAYERS if family == "gemma3" else {})
    names = {value: key for key, value in {**inside, **OUTSIDE_LAYERS}.items()}
    for name, values in seeded_tensors(config).items():
        stem, _, what = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            name = f"blk.{layer}.{names[part]}.{what}"
        else:
            part, name = stem, f"{names[stem]}.{what}"
        if family == "gemma3" and values.ndim == 1:
            values = values + 1  # as the converter writes norms
        if family == "llama" and part.endswith(("q_proj", "k_proj")):
            values = neighbours(values, heads if "q_proj" in part else config["num_key_value_heads"])
        if values.ndim == 2 and values.shape[1] % 32 == 0 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def llama3_frequencies(plain: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3's scaled frequencies, as published with the model."""
    length, low, high = (
        scaling["original_max_position_embeddings"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
    )
    found = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < length / high:
            found.append(frequency)
        elif wavelength > length / low:
            found.append(frequency / scaling["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(found)


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_folder_it_was_made_of(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    folder, file = (
        load_model(write_checkpoint(tmp_path / "in", config)),
        load_model(write_gguf(tmp_path / "a.gguf", config)),
    )
    assert file.config == folder.config and file.end_ids == folder.end_ids == (0,)
    assert file.context_length == folder.context_length
    np.testing.assert_allclose(logits_of(file), logits_of(folder), atol=1e-4)


def test_the_order_of_rotated_rows_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CASES["llama"]
    folder, file = write_checkpoint(tmp_path / "in", config), write_gguf(tmp_path / "a.gguf", config)
    monkeypatch.setattr("aspd_jax.formats.gguf.halves_of_heads", lambda values, heads: values)
    assert np.abs(logits_of(load_model(file)) - logits_of(load_model(folder))).max() > 0.1


def test_a_quantised_file_holds_what_its_format_says(tmp_path: Path) -> None:
    """Check Q8_0: blocks of 32 numbers, each a signed byte times the block's scale in float16."""
    config = CASES["llama"]
    tensors = seeded_tensors(config)
    for name, values in tensors.items():
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            blocks = values.reshape(-1, 32)
            exact = np.abs(blocks).max(axis=1, keepdims=True) / 127
            tensors[name] = (
                (np.rint(blocks / exact) * exact.astype(np.float16)).astype(np.float32).reshape(values.shape)
            )
    folder = write_checkpoint(tmp_path / "in", config)
    save_file(tensors, folder / "model.safetensors")
    file = write_gguf(tmp_path / "a.gguf", config, GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(logits_of(load_model(file)), logits_of(load_model(folder)), atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "F16", "BF16"])
def test_quantised_files(kind: str, tmp_path: Path) -> None:
    config = CASES["llama"]
    exact = logits_of(load_model(write_gguf(tmp_path / "exact.gguf", config)))
    rounded = logits_of(load_model(write_gguf(tmp_path / "a.gguf", config, GGMLQuantizationType[kind])))
    error = np.sqrt(((rounded - exact) ** 2).mean() / exact.var())
    assert 1e-5 < error < (0.05 if kind in ("F16", "BF16") else 0.8)


def test_conversion_gives_a_folder_that_loads_alike(tmp_path: Path) -> None:
    from aspd import main

    file = write_gguf(tmp_path / "a.gguf", CASES["llama_tied"])
    assert main(["convert", str(file), "--output", str(tmp_path / "out")]) == 0
    one, other = load_model(file), load_model(tmp_path / "out")
    assert one.config == other.config and one.end_ids == other.end_ids
    np.testing.assert_array_equal(logits_of(one), logits_of(other))
    assert main(["convert", str(file), "--output", str(tmp_path / "out")]) == 2  # it is there already


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = CASES["llama"]
    whole = write_gguf(tmp_path / "a.gguf", config).read_bytes()
    for name, content, message in (
        ("text", b"hello", "expected a GGUF file, got a truncated file"),
        ("header", whole[:100], "expected a GGUF file, got a truncated file"),
        ("tensors", whole[: len(whole) // 2], "expected a GGUF file, got a truncated file"),
        ("last", whole[:-1000], "expected a GGUF file, got a truncated file"),
    ):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path / f"{name}.gguf")
    with pytest.raises(CheckpointError, match=r"architecture: expected one of llama, .*, got 'gpt2'"):
        load_model(write_gguf(tmp_path / "b.gguf", config, architecture="gpt2"))
    # An unknown number for how a tensor is quantised: the last field before its offset.
    name = b"output_norm.weight"
    at = whole.index(name) + len(name) + 4 + 8
    (tmp_path / "c.gguf").write_bytes(whole[:at] + (77).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(CheckpointError, match=r"output_norm.weight: expected a known quantisation, got number 77"):
        load_model(tmp_path / "c.gguf")


def test_other_rope_factors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.aspd_jax.formats.test_gguf.llama3_frequencies",
        lambda plain, scaling: plain / np.linspace(1, 8, len(plain)),
    )
    with pytest.raises(CheckpointError, match="expected the factors of Llama 3's"):
        open_checkpoint(write_gguf(tmp_path / "a.gguf", CASES["llama_llama3"]))


def test_halves_of_heads_undoes_the_converter() -> None:
    rows = np.arange(24).reshape(12, 2)
    assert (halves_of_heads(neighbours(rows, 3), 3) == rows).all()


def with_keys(source: Path, target: Path, **keys: Any) -> Path:
    """A copy of a GGUF file with more values; None: without this key."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in keys:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for key, value in keys.items():
        if value is None:
            continue
        kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", CASES["llama"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("attention.scale", 0.5), ("logit_scale", 2.0), ("embedding_scale", 2.0), ("residual_scale", 0.5)),
        *(("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("attention.clamp_kqv", 8.0)),
        *(("attention.sliding_window", 16), ("expert_count", 4), ("rope.scaling.attn_factor", 1.5)),
        *(("rope.scaling.yarn_log_multiplier", 0.1), ("attention.causal", False), ("rope.dimension_count", 8)),
        *(("attention.head_count_kv", [2, 1]), ("use_parallel_residual", True), ("something_later", "on")),
    ],
)
def test_a_value_that_nothing_reads_is_refused(key: str, value: Any, plain_file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"llama\.{key}"):
        open_checkpoint(with_keys(plain_file, tmp_path / "a.gguf", **{f"llama.{key}": value}))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.embedding_length", "32", "a whole number above 0, got '32'"),
        ("llama.attention.head_count", 0, "a whole number above 0, got 0"),
        ("llama.block_count", 2.0, "a whole number above 0, got 2.0"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "a number above 0, got nan"),
        ("llama.rope.freq_base", -1.0, "a number above 0, got -1.0"),
        ("llama.rope.scaling.factor", "x", "a number, 0 or more, got 'x'"),
        ("split.count", "three", "a whole number, 0 or more, got three"),
        ("tokenizer.ggml.eos_token_id", "x", "a token id, got x"),
        ("tokenizer.ggml.model", 3, "a string, got 3"),
    ],
)
def test_a_value_of_another_type_is_refused(
    key: str, value: Any, expected: str, plain_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"{key}: expected {expected}"):
        open_checkpoint(with_keys(plain_file, tmp_path / "a.gguf", **{key: value}))


@pytest.mark.parametrize(
    "broken",
    [
        {"model": "llama", "scores": [0.0] * 5, "unknown_token_id": 9},
        {"model": "llama", "scores": [0.0] * 3},
        {"model": "gpt2", "pre": "qwen2", "merges": ["a z"]},
        {"model": "gpt2", "pre": "qwen2", "merges": ["ab"]},
    ],
)
def test_a_broken_tokenizer_is_named(broken: dict[str, Any], plain_file: Path, tmp_path: Path) -> None:
    keys = {
        f"tokenizer.ggml.{key}": value for key, value in ({"tokens": ["<u>", "a", "b", "ab", "abab"]} | broken).items()
    }
    with pytest.raises(CheckpointError, match=r"a\.gguf: expected a tokenizer, got a broken one: "):
        open_checkpoint(with_keys(plain_file, tmp_path / "a.gguf", **keys))


def test_neutral_values_change_nothing(plain_file: Path, tmp_path: Path) -> None:
    keys = {"logit_scale": 1.0, "expert_count": 0, "attention.causal": True, "use_parallel_residual": False}
    keys |= {"attention.head_count_kv": [2, 2], "rope.scaling.attn_factor": 1.0, "attention.scale": 0.0}
    made = open_checkpoint(with_keys(plain_file, tmp_path / "a.gguf", **{f"llama.{k}": v for k, v in keys.items()}))
    assert made.hf_config == open_checkpoint(plain_file).hf_config
    linear = open_checkpoint(with_keys(plain_file, tmp_path / "b.gguf", **{"llama.rope.scaling.factor": 3.0}))
    scaling = linear.hf_config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("linear", 3.0), "llama.cpp's default"


def test_every_end_ends_an_answer(plain_file: Path, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    assert open_checkpoint(with_keys(plain_file, tmp_path / "a.gguf", **keys)).end_ids == (2, 7, 9)
    keys["tokenizer.ggml.eot_token_id"] = 4_000_000_000
    with pytest.raises(CheckpointError, match=r"eot_token_id: expected an id below 64, got 4000000000"):
        open_checkpoint(with_keys(plain_file, tmp_path / "b.gguf", **keys))


def split(source: Path, folder: Path, count: int) -> list[Path]:
    """A file cut as `llama-gguf-split` cuts it: all values in the first part."""
    reader, files = GGUFReader(source), []
    for number in range(count):
        file = folder / f"model-{number + 1:05d}-of-{count:05d}.gguf"
        writer = GGUFWriter(file, "llama")
        for key, field in reader.fields.items():
            if not number and not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(file)
    return files


def test_a_split_file_is_read_whole_or_its_parts_are_named(plain_file: Path, tmp_path: Path) -> None:
    files = split(plain_file, tmp_path, 3)
    whole = dict(open_checkpoint(plain_file).tensors())
    for place in (*files, tmp_path):  # any part, and the folder of one model
        found = dict(open_checkpoint(place).tensors())
        assert found.keys() == whole.keys() and all((found[name] == whole[name]).all() for name in whole)
    (tmp_path / "other.gguf").write_bytes(plain_file.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"expected one GGUF model, got model-00001-of-00003\.gguf, .*, other\.gguf"
    ):
        open_checkpoint(tmp_path)
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"expected 3 parts .*, got no model-00002-of"):
        open_checkpoint(files[0])
    renamed = files[2].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"expected 3 parts .*, got part 3 under another name"):
        open_checkpoint(renamed)


def test_a_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match="expected a GGUF file, got a Git LFS pointer"):
        open_checkpoint(tmp_path / "a.gguf")
