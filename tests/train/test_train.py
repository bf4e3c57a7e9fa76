"""The loss, its targets, and the configurations of training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import train.loss
from aspd_jax import load_model
from aspd_jax.configuration import config_from_dict, read_config
from aspd_jax.errors import ConfigError
from aspd_jax.pipeline.data_config import DataConfig
from infer.evaluation.config import EvalConfig
from tests.conftest import ROOT
from tests.helpers.training import first_batch, small
from train.config import TrainConfig
from train.loss import next_token_loss


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_loss_against_a_loop(chunk: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(train.loss, "CHUNK", chunk)
    random = np.random.default_rng(0)
    hidden, kernel = random.standard_normal((2, 5, 4)), random.standard_normal((7, 4))
    tokens, part = random.integers(0, 7, (2, 5)), random.integers(0, 3, (2, 5))
    weight = random.integers(0, 3, (2, 5)).astype(np.float32)
    logits = hidden @ kernel.T
    total, count = np.zeros(3), np.zeros(3)
    for row in range(2):
        for s in range(4):
            loss = np.log(np.exp(logits[row, s]).sum()) - logits[row, s, tokens[row, s + 1]]
            total[part[row, s + 1]] += weight[row, s + 1] * loss
            count[part[row, s + 1]] += weight[row, s + 1]
    x, *arrays = (jnp.asarray(x) for x in (hidden.astype(np.float32), tokens, weight, part))
    sums = next_token_loss(x, lambda x: x @ kernel.astype(np.float32).T, *arrays, parts=3)
    np.testing.assert_allclose(sums.loss, total, rtol=1e-5)
    np.testing.assert_array_equal(sums.weight, count)
    assert float(sums.mean()) == pytest.approx(total.sum() / count.sum(), rel=1e-5)


def test_targets_belong_to_their_parts() -> None:
    config = small()
    lm = load_model(config.model.checkpoint)
    batch, special = first_batch(config, lm), lm.codec.special
    for row in range(config.data.rows):
        expected, part = [], 0
        for token in batch.tokens[row]:
            part = {special.title_start: 1, special.branch_start: 2}.get(int(token), part)
            expected.append(part)
            part = 0 if token in (special.title_end, special.branch_end) else part
        assert batch.part[row].tolist() == expected and set(expected) == {0, 1, 2}


CONFIGS: dict[str, type] = {
    "data": DataConfig,
    "eval": EvalConfig,
    "eval_7b": EvalConfig,
    "lists": EvalConfig,
    "gsm8k": EvalConfig,
    "spec_bench": EvalConfig,
}
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_shipped_configs_load(file: Path) -> None:
    kind = CONFIGS.get(file.stem, CONFIGS.get(f"{file.parent.name}/{file.stem}", TrainConfig))
    config = read_config(kind, file)
    assert isinstance(config, kind)
    if isinstance(config, EvalConfig) and all(bench.kind != "numbers" for bench in config.benchmarks.values()):
        assert config.speed.questions, "0 would time no question"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("stepps: 3", [], "unknown key 'stepps'; did you mean 'steps'"),
        ("steps: many", [], "steps: expected int, got 'many'"),
        ("length: 8", [], "unknown key 'length'; did you mean 'data.length'"),
        ("data: {lenght: 8}", [], "unknown key 'data.lenght'; did you mean 'data.length'"),
        ("", ["data.rowss=3"], "unknown key 'data.rowss'; did you mean 'data.rows'"),
        ("data: 3", [], "data: expected `key: value` lines, got 3"),
        ("data: {structured: 1}", [], "data.structured: expected bool, got 1"),
        ("data: {train: [1]}", [], "data.train: expected a list of strings"),
        ("model: {positions: same}", [], "positions: expected one of sequential, max, predict"),
        ("model: {dtype: float16}", [], "model.dtype: expected float32 or bfloat16"),
        ("model: {weights: int8}", [], "expected model.lora_rank, got 0"),
        ("model: {checkpoint: x}\nsteps: 1", [], "data.train: expected a value, got none"),
        ("data: {train: [x]}\nsteps: 1", [], "model.checkpoint: expected a value, got none"),
        ("model: {heads: 4, kv_heads: 3}", [], r"model.heads: expected a multiple of model.kv_heads \(3\), got 4"),
        ("", ["data.train=[a.jsonl]"], "steps: expected steps or epochs"),
        ("", ["data.train=[a.jsonl]", "data.held_out=[b.jsonl, a.jsonl]", "epochs=1"], "got 'a.jsonl' in both"),
        ("steps: 0", [], "steps: expected steps or epochs"),
        ("log_every: 0", [], "log_every: expected at least 1, got 0"),
        ("mesh: {fsdp: 4}", [], r"data.rows: expected a multiple of mesh.data x mesh.fsdp .* \(4\), got 6"),
        ("optimiser: {warmup: 3}", [], "optimiser.warmup: expected a share from 0 to 1"),
        ("optimiser: {learning_rate: .nan}", [], "optimiser.learning_rate: expected at least 0, got nan"),
        ("optimiser: {beta2: 1}", [], "optimiser.beta2: expected a rate from 0 to below 1"),
        ("optimiser: {clip: 0}", [], "optimiser.clip: expected a norm above 0"),
        ("model: {kv_heads: 0}", [], "model.kv_heads: expected at least 1, got 0"),
        ("model: {head_dim: 33}", [], "model.head_dim: expected an even number, got 33"),
        ("model: {lora_rank: -4}", [], "model.lora_rank: expected at least 0, got -4"),
        ("data: {rows: 6}\nsteps: 3\ndata: {bins: 3}", [], "expected different keys, got 'data' twice"),
        ("data: {rows: 6, rows: 12}", [], "expected different keys, got 'rows' twice"),
        ("evaluate_batches: 1\ndata: {train: x}", [], "evaluate_batches: expected data.held_out"),
        ("data: {train: x, held_out: y}", [], "evaluate_batches: expected at least 1 for data.held_out, got 0"),
        ("data: {train: x, held_out: a/../x}", [], "expected other files than data.train, got 'a/../x' in both"),
        ("model: {lora_alpha: 0}", [], "model.lora_alpha: expected a number above 0, got 0"),
        ("steps: [", [], "config.yaml: "),
        ("- 1", [], "expected `key: value` lines, got list"),
        ("", ["steps"], "expected key=value, got 'steps'"),
        (
            "data: {train: [a]}",
            ["data.train.0=b"],
            r"'data.train.0=b': train: expected `key: value` lines, got \['a'\]",
        ),
        ("steps: 1", ["steps.x.y=2"], "'steps.x.y=2': steps: expected `key: value` lines, got 1"),
    ],
)
def test_config_errors_name_file_and_field(text: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(TrainConfig, tmp_path / "config.yaml", overrides)


def test_configs_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes("model: {checkpoint: café}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.yaml: unacceptable character #x00e9"):
        read_config(TrainConfig, file)
    file.write_bytes("steps: 1\ndata: {train: é, cache: é}\nmodel: {checkpoint: &name é}".encode())
    assert read_config(TrainConfig, file).data.train == (read_config(TrainConfig, file).model.checkpoint,) == ("é",)


def test_config_reads_overrides_and_exponents(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "steps: 7\nmodel: {checkpoint: demo}\ndata: {train: a.jsonl}\noptimiser:\n  learning_rate: 3e-4\n  clip: 2\n"
    )
    config = read_config(
        TrainConfig, tmp_path / "config.yaml", ["steps=9", "model.siblings=shared", "optimiser.beta1=0.8"]
    )
    assert (config.steps, config.model.siblings) == (9, "shared")
    assert (config.optimiser.learning_rate, config.optimiser.clip, config.optimiser.beta1) == (3e-4, 2.0, 0.8)
    assert config_from_dict(TrainConfig, json.loads(json.dumps(asdict(config))), "config.json") == config
    with pytest.raises(ConfigError, match="expected a YAML file, got none"):
        read_config(TrainConfig, tmp_path / "none.yaml")
