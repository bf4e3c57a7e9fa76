"""A training run from scratch on the synthetic tasks: resumable, and a pure function of its configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from tqdm import tqdm

from aspd_jax.errors import ConfigError
from aspd_jax.language_model import LanguageModel, random_model, save_model
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.transformer import Transformer
from aspd_jax.structure import Parallel
from train.batches import synthetic_batch
from train.config import TrainConfig
from train.step import TrainState, make_optimiser, train_step
from train.tasks import problem
from train.vocabulary import train_tokenizer

TOKENIZER_PROBLEMS = 4000


def initial_model(config: TrainConfig) -> LanguageModel:
    """A random Qwen3-style model and a tokenizer made for the tasks."""

    def texts() -> Iterator[str]:
        for seed in range(TOKENIZER_PROBLEMS):
            item = problem(seed, held_out=False)
            yield item.question
            yield item.answer
            for part in item.structure:
                if isinstance(part, Parallel):
                    yield from (branch.title for branch in part.branches)

    tokenizer = train_tokenizer(texts(), config.vocabulary)
    if len(tokenizer) > config.vocabulary:
        raise ConfigError(f"vocabulary must be at least {len(tokenizer)}, got {config.vocabulary}")
    hf_config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": config.embed,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model_config = ModelConfig(
        vocabulary=config.vocabulary,
        embed=config.embed,
        feed_forward=config.feed_forward,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head=config.head,
        query_norm=True,
        tied=True,
        positions=config.positions,
        siblings=config.siblings,
    )
    return random_model(model_config, tokenizer, hf_config, config.seed, (tokenizer.eos_token_id,))


def train(config: TrainConfig, output: Path, progress: bool = True) -> LanguageModel:
    """Train, and leave in `output`: model/ (Hugging Face layout), metrics.jsonl, config.json, checkpoints/.

    A killed run goes on from its last checkpoint when it is started again with the same configuration.

    Raises:
        ConfigError: `output` holds a run of another configuration.
    """
    output.mkdir(parents=True, exist_ok=True)
    _claim(output, config)
    lm = initial_model(config)
    codec, tokenizer = lm.codec, lm.tokenizer
    model = Transformer(lm.config, attention="chunked")
    optimiser = make_optimiser(config)
    state = TrainState(jnp.zeros((), jnp.int32), lm.params, optimiser.init(lm.params))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=config.save_every)
    with ocp.CheckpointManager((output / "checkpoints").absolute(), options=options) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = checkpoints.restore(first, args=ocp.args.StandardRestore(abstract))
        with open(output / "metrics.jsonl", "a") as metrics_file:
            bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=not progress)
            start = time.monotonic()
            for step in bar:
                state, metrics = train_step(state, synthetic_batch(codec, tokenizer, config, step), model, optimiser)
                if (step + 1) % 20 == 0 or step + 1 == config.steps:
                    values = {name: float(value) for name, value in metrics.items()}
                    seconds = round(time.monotonic() - start, 1)
                    metrics_file.write(json.dumps({"step": step + 1, **values, "seconds": seconds}) + "\n")
                    metrics_file.flush()
                    bar.set_postfix(loss=f"{values['loss']:.4f}")
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state), force=step + 1 == config.steps)
    trained = replace(lm, params=jax.device_get(state.params))
    if not (output / "model").exists():
        save_model(trained, output / "model")
    return trained


def _claim(output: Path, config: TrainConfig) -> None:
    """Note the configuration in the folder, or check that it is the one noted there."""
    file = output / "config.json"
    values: dict[str, Any] = config.as_dict()
    if not file.exists():
        file.write_text(json.dumps(values, indent=2) + "\n")
        return
    there = json.loads(file.read_text())
    different = sorted(key for key in values | there if values.get(key) != there.get(key))
    if different:
        raise ConfigError(
            f"{output} holds a run with another {', '.join(different)}; choose another folder, or delete this one"
        )
