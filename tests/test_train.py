from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.loop
from aspd_jax import LanguageModel, load_model
from aspd_jax.errors import ConfigError
from aspd_jax.structure import Parallel, plain_text
from tests.conftest import ROOT
from train.batches import example, first_fit, pack, synthetic_batch
from train.config import TrainConfig, load_config
from train.loop import initial_model
from train.loop import train as run_training
from train.loss import next_token_loss
from train.tasks import FAMILIES, KINDS, held_out, is_held_out, problem

SMALL = TrainConfig(
    layers=1, embed=32, heads=2, kv_heads=1, head=16, feed_forward=32, rows=2, short_rows=3, short_length=96,
    short_steps=2, steps=4, save_every=2, vocabulary=768, plain_every=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def small_lm() -> LanguageModel:
    return initial_model(SMALL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_problems_are_what_their_kind_says(family: str, kind: str) -> None:
    counts = set()
    for seed in range(60):
        made = problem(seed, held_out=seed % 2 == 0, family=family, kind=kind)
        assert made == problem(seed, held_out=seed % 2 == 0, family=family, kind=kind)
        assert is_held_out(made.question) == (seed % 2 == 0)
        assert made.forks == (kind in ("parallel", "conclusion"))
        assert made.answer == plain_text(made.structure) and made.answer.endswith("\n")
        for item in made.structure:
            if isinstance(item, Parallel):
                counts.add(len(item.branches))
                assert len({branch.title for branch in item.branches}) == len(item.branches)
    assert not counts or (min(counts) == 3 and max(counts) >= 7)


def test_arithmetic_in_answers_is_right() -> None:
    """Every `a op b = c` in every answer, evaluated."""
    checked = 0
    for made in held_out(240):
        for a, op, b, c in re.findall(r"\$?(\d+) ([-+x]) \$?(\d+) = \$?(\d+)", made.answer):
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "x": int(a) * int(b)}[op] == int(c)
            checked += 1
        for quantity, price, total in re.findall(r"^(\d+) \w+ at \$(\d+) each come to \$(\d+)", made.answer, re.M):
            assert int(quantity) * int(price) == int(total)
            checked += 1
    assert checked > 500


def test_held_out_is_balanced_and_apart_from_training() -> None:
    problems = list(held_out(48))
    assert {(p.family, p.kind) for p in problems} == {(f, k) for f in FAMILIES for k in KINDS}
    trained = {problem(seed, held_out=False).question for seed in range(500)}
    assert not trained & {p.question for p in problems}


def test_loss_lies_on_sampled_answer_tokens_only(small_lm: LanguageModel) -> None:
    codec, tokenizer = small_lm.codec, small_lm.tokenizer
    made = problem(3, False, "records", "conclusion")
    item = example(codec, tokenizer, made, structured=True)
    start = len(tokenizer.apply_chat_template(
        [{"role": "user", "content": made.question}], add_generation_prompt=True, return_dict=False
    ))  # fmt: skip
    assert not item.loss[:start].any() and item.loss[-1] and item.tokens[-1] == tokenizer.eos_token_id
    answer = codec.linearise(made.structure)
    np.testing.assert_array_equal(item.loss[start:-1], ~answer.fed)
    everything = example(codec, tokenizer, made, structured=True, fed_loss=True)
    assert everything.loss[start:].all() and not everything.loss[:start].any()
    plain = example(codec, tokenizer, made, structured=False)
    assert codec.text.decode(plain.tokens[start:-1]) == made.answer


def test_first_fit_fills_rows_with_the_longest_first() -> None:
    placed = first_fit([3, 9, 5, 5, 7, 1], rows=2, length=10)
    assert placed == [1, 0, None, None, 1, 0]
    with pytest.raises(ConfigError, match="an example has 11 tokens, a row has 10; raise `length`"):
        first_fit([11], rows=1, length=10)


def test_packed_rows_keep_examples_whole(small_lm: LanguageModel) -> None:
    codec = small_lm.codec
    examples = [example(codec, small_lm.tokenizer, problem(seed, False, kind="single"), True) for seed in range(5)]
    placed = first_fit([len(item.tokens) for item in examples], 2, 200)
    batch = pack(examples, placed, codec.special, 2, 200, "sequential")
    found = []
    for row in range(2):
        for number in range(1, batch.layout.sequence[row].max() + 1):
            inside = batch.layout.sequence[row] == number
            found.append((batch.tokens[row][inside].tolist(), batch.loss[row][inside].tolist()))
    kept = [item for item, row in zip(examples, placed, strict=True) if row is not None]
    expected = [(item.tokens.tolist(), item.loss.astype(float).tolist()) for item in kept]
    assert sorted(found) == sorted(expected)


def test_aspd_and_seq_see_the_same_problems(small_lm: LanguageModel) -> None:
    batches = [
        synthetic_batch(small_lm.codec, small_lm.tokenizer, replace(SMALL, structured=structured), 3)
        for structured in (True, False)
    ]
    decode = small_lm.tokenizer.decode
    questions = []
    for batch in batches:
        own = []
        for row in range(SMALL.rows):
            for number in range(1, batch.layout.sequence[row].max() + 1):
                text = decode(batch.tokens[row][batch.layout.sequence[row] == number])
                own.append(text.split("<|assistant|>")[0])
        questions.append(own)
    assert questions[0] == questions[1] and len(questions[0]) > 2
    assert batches[0].layout.branch.any() and not batches[1].layout.branch.any()


def test_loss_against_a_loop() -> None:
    random = np.random.default_rng(0)
    logits, tokens = random.standard_normal((2, 5, 7)).astype(np.float32), random.integers(0, 7, (2, 5))
    weight = random.integers(0, 2, (2, 5)).astype(np.float32)
    total = 0.0
    for row in range(2):
        for s in range(4):
            row_logits = logits[row, s].astype(np.float64)
            total += weight[row, s + 1] * (np.log(np.exp(row_logits).sum()) - row_logits[tokens[row, s + 1]])
    loss, weights = next_token_loss(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(weight))
    assert float(loss) == pytest.approx(total, rel=1e-5) and float(weights) == weight[:, 1:].sum()


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch: Any) -> None:
    whole = run_training(SMALL, tmp_path / "whole", progress=False)

    def failing(*args: Any) -> Any:
        if args[-1] == 3:
            raise KeyboardInterrupt
        return synthetic_batch(*args)

    monkeypatch.setattr(train.loop, "synthetic_batch", failing)
    with pytest.raises(KeyboardInterrupt):
        run_training(SMALL, tmp_path / "cut", progress=False)
    monkeypatch.undo()
    seen = []
    monkeypatch.setattr(train.loop, "synthetic_batch", lambda *args: seen.append(args[-1]) or synthetic_batch(*args))
    resumed = run_training(SMALL, tmp_path / "cut", progress=False)
    assert seen == [2, 3], "goes on from the checkpoint of step 2"
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    loaded = load_model(tmp_path / "cut" / "model")
    jax.tree.map(np.testing.assert_array_equal, whole.params, loaded.params)
    assert json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
    with pytest.raises(ConfigError, match="holds a run with another seed"):
        run_training(replace(SMALL, seed=1), tmp_path / "cut")


CHANGED: dict[str, Any] = {
    "structured": False, "positions": "max", "siblings": "shared", "vocabulary": 800, "layers": 2, "embed": 48,
    "heads": 1, "kv_heads": 2, "head": 8, "feed_forward": 48, "rows": 1, "length": 400, "short_steps": 0,
    "short_rows": 1, "short_length": 120, "steps": 3, "learning_rate": 1e-2, "warmup": 1.0, "weight_decay": 0.5,
    "beta2": 0.5, "clip": 1e-4, "fed_loss": True, "seed": 1, "save_every": 3, "plain_every": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(TrainConfig)])
def test_every_field_changes_the_run(name: str, tmp_path: Path) -> None:
    if "whole" not in REFERENCE:
        REFERENCE["whole"] = outcome(SMALL, tmp_path / "reference")
    assert getattr(SMALL, name) != CHANGED[name]
    assert outcome(replace(SMALL, **{name: CHANGED[name]}), tmp_path / "changed") != REFERENCE["whole"]


REFERENCE: dict[str, Any] = {}


def outcome(config: TrainConfig, output: Path) -> Any:
    """Final parameters and the checkpoints that are left."""
    trained = run_training(config, output, progress=False)
    leaves = [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(trained.params)]
    saved = sorted(int(folder.name) for folder in (output / "checkpoints").iterdir() if folder.name.isdigit())
    return leaves, saved, trained.config.siblings


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_configs_load(file: Path) -> None:
    assert isinstance(load_config(file), TrainConfig)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("stepps: 3", [], "unknown key 'stepps'; did you mean 'steps'"),
        ("steps: many", [], "steps must be int, got 'many'"),
        ("structured: 1", [], "structured must be bool, got 1"),
        ("positions: same", [], "positions must be one of sequential, max, predict"),
        ("steps: 0", [], "steps must be at least 1"),
        ("heads: 4\nkv_heads: 3", [], r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ("steps: [", [], "config.yaml: "),
        ("- 1", [], "must hold `key: value` lines"),
        ("", ["steps"], "'steps' is not key=value"),
    ],
)
def test_config_errors_name_file_and_field(text: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.yaml", overrides)


def test_config_reads_overrides_and_exponents(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 7\nlearning_rate: 3e-4\n")
    config = load_config(tmp_path / "config.yaml", ["steps=9", "siblings=shared"])
    assert (config.steps, config.learning_rate, config.siblings) == (9, 3e-4, "shared")
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
