"""Configurations of small training runs, and checks of their output."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerFast

from aspd_jax.language_model import LanguageModel, random_model, save_model
from aspd_jax.model.config import from_hugging_face
from aspd_jax.sharding import make_mesh
from aspd_jax.structure import Parallel
from tests.helpers.byte_tokenizer import train_tokenizer
from tests.helpers.tasks import problem, record
from train.batches import Batch, record_batches
from train.config import DataSection, ModelSection, TrainConfig
from train.records import Records
from train.setup import Setup, as_configured, load, set_up

FOLDER = TemporaryDirectory(prefix="aspd-training-")  # of this process: checkpoints and records


def changed(config: TrainConfig, **values: Any) -> TrainConfig:
    """A configuration with other values; `section__field` reaches into a section."""
    top = {name: value for name, value in values.items() if "__" not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if "__" in name:
            section, _, field = name.partition("__")
            inner.setdefault(section, {})[field] = value
    return replace(config, **top, **{name: replace(getattr(config, name), **some) for name, some in inner.items()})


@cache
def task_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 768 tokens, trained on the synthetic tasks."""
    texts = []
    for item in (problem(seed, held_out=False) for seed in range(400)):
        branches = [branch for part in item.structure if isinstance(part, Parallel) for branch in part.branches]
        texts += [item.question, item.answer, *(branch.title for branch in branches)]
    return train_tokenizer(texts, 768)


def initial_model(config: TrainConfig) -> LanguageModel:
    """A random Qwen3-style model with the shape, form and seed of a configuration."""
    section, tokenizer = config.model, deepcopy(task_tokenizer())
    end = tokenizer.eos_token_id
    values = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": section.hidden_size,
        "intermediate_size": section.feed_forward, "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads, "num_key_value_heads": section.kv_heads, "head_dim": section.head_dim,
        "vocab_size": section.vocab_size, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": end,
    }  # fmt: skip
    shape = as_configured(from_hugging_face(AutoConfig.for_model(**values), section.dtype), config)
    return random_model(shape, tokenizer, values, config.seed, (end,))


def written(config: TrainConfig, folder: Path) -> TrainConfig:
    """Write a checkpoint of a configuration's shape and two files of records; return it with the first ones."""
    save_model(initial_model(config), folder / "base")
    for name, first in (("train", 0), ("held_out", 1000)):
        made = [problem(first + seed, name == "held_out", "orders") for seed in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record(item)) + "\n" for item in made))
    return changed(config, model__checkpoint=str(folder / "base"), data__train=(str(folder / "train.jsonl"),))


def with_held_out(config: TrainConfig) -> TrainConfig:
    """A configuration of `written` with its held-out records, one batch of which is evaluated."""
    file = Path(config.model.checkpoint).parent / "held_out.jsonl"
    return changed(config, data__held_out=(str(file),), evaluate_batches=1)


SHAPE = TrainConfig(
    model=ModelSection(
        checkpoint="none", titles="names", layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32
    ),
    data=DataSection(train=("none",), rows=2, bins=4, plain_every=0),
    steps=4,
    save_every=2,
)


@cache
def small() -> TrainConfig:
    """A run of the smallest model."""
    return written(SHAPE, Path(FOLDER.name) / "small")


@cache
def wide() -> TrainConfig:
    """A run that eight devices can share."""
    shape = changed(
        SHAPE, model__layers=2, model__hidden_size=64, model__heads=4, model__kv_heads=2, data__rows=8,
        data__length=128, log_every=1,
    )  # fmt: skip
    return written(shape, Path(FOLDER.name) / "wide")


def on_records(folder: Path) -> TrainConfig:
    """Fine-tuning of a small checkpoint on records in files, both of which are written to `folder`."""
    config = with_held_out(written(SHAPE, folder))
    return changed(config, data__length=512, optimiser__learning_rate=1e-2, steps=6, log_every=1)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))
    return [line["loss"] for line in lines if "loss" in line]


def prepared(config: TrainConfig) -> Setup:
    mesh = make_mesh(vars(config.mesh))
    return set_up(config, load(config, mesh), mesh, config.steps)


def first_batch(config: TrainConfig, lm: LanguageModel) -> Batch:
    """The first batch of a run."""
    records = Records(lm, config.data.train, config.data, Path(FOLDER.name) / "tokenised")
    return next(record_batches(records, lm.codec.special, config))
