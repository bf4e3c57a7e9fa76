"""Input of training: synthetic problems, batches, the loss and configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import train.loss
from aspd_jax import LanguageModel
from aspd_jax.configuration import config_from_dict, read_config
from aspd_jax.errors import ConfigError
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.structure import Parallel, from_json, plain_text
from infer.evaluation.config import EvalConfig
from tests.conftest import ROOT
from tests.helpers.training import SMALL, changed
from train.ablation_models import AblationConfig
from train.batches import example, first_fit, pack, synthetic_batch
from train.config import TrainConfig, load_config
from train.loss import next_token_loss
from train.setup import initial_model
from train.tasks import FAMILIES, KINDS, LONG_FAMILY, conversations, held_out, is_held_out, problem, recital


@pytest.fixture(scope="module")
def small_lm() -> LanguageModel:
    return initial_model(SMALL)


@pytest.mark.parametrize("family", [*FAMILIES, LONG_FAMILY])
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
    assert not counts or (min(counts) == 3 and max(counts) >= (5 if family in ("records", LONG_FAMILY) else 7))


def test_arithmetic_in_answers_is_right() -> None:
    """Evaluate every `a op b = c` in every answer."""
    checked = 0
    for made in held_out(240):
        for a, op, b, c in re.findall(r"\$?(\d+) ([-+x]) \$?(\d+) = \$?(\d+)", made.answer):
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "x": int(a) * int(b)}[op] == int(c)
            checked += 1
        for quantity, price, total in re.findall(r"^(\d+) \w+ at \$(\d+)[^$]* come to \$(\d+)", made.answer, re.M):
            assert int(quantity) * int(price) == int(total)
            checked += 1
    assert checked > 500


def test_recitals_repeat_their_words() -> None:
    for seed in range(50):
        made = recital(seed)
        words = re.findall(r"\w+", made.question)
        rest = made.answer
        for word in words:
            assert f" {word}" in rest
            rest = rest[rest.index(f" {word}") + len(word) + 1 :]
        assert len(words) == len(set(words)) >= 6 and not made.forks


def test_held_out_is_balanced_and_apart_from_training() -> None:
    problems = list(held_out(48))
    assert {(p.family, p.kind) for p in problems} == {(f, k) for f in FAMILIES for k in KINDS}
    assert {(p.family, p.kind) for p in held_out(4, long=True)} == {(LONG_FAMILY, k) for k in KINDS}
    trained = {problem(seed, held_out=False).question for seed in range(500)}
    assert not trained & {p.question for p in problems}


def test_letters_say_what_the_facts_say() -> None:
    """Check that a letter has the facts of its name, and mentions no pet without one."""
    for made in (problem(seed, True, LONG_FAMILY, "parallel") for seed in range(40)):
        lines = (line.split(": ") for line in made.question.splitlines() if ": " in line)
        facts = {name: fact.split(", ") for name, fact in lines}
        block = next(item for item in made.structure if isinstance(item, Parallel))
        for branch in block.branches:
            job, city, age, hobby, *pet = facts[branch.title]
            said = re.fullmatch(
                r"Dear (\w+), the (\w+) club of (\w+) is looking for a (\w+)\. "
                r"At (\d+) you are not too old for (\w+)(?:, and there is room for your (\w+))?\. "
                r"Yours, the club of (\w+)\.\n",
                branch.text,
            )
            assert said is not None
            assert said.groups() == (branch.title, hobby, city, job, age, hobby, pet[0] if pet else None, city)


def test_conversations_are_problems_to_train_on() -> None:
    made = list(conversations(12, held_out=False, long_every=3))
    of = [problem(seed, False, LONG_FAMILY if seed % 3 == 2 else None) for seed in range(12)]
    assert [record["messages"][0]["content"] for record in made] == [item.question for item in of]
    assert [plain_text(from_json(record["structure"])) for record in made] == [item.answer for item in of]
    assert not any(is_held_out(item.question) for item in of)
    assert all(is_held_out(record["messages"][0]["content"]) for record in conversations(3, held_out=True))


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
    with pytest.raises(ConfigError, match=r"data\.length: expected at least the tokens of every example, 11, got 10"):
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
        synthetic_batch(small_lm.codec, small_lm.tokenizer, changed(SMALL, data__structured=structured), 3)
        for structured in (True, False)
    ]
    decode = small_lm.tokenizer.decode
    questions = []
    for batch in batches:
        own = []
        for row in range(SMALL.data.rows):
            for number in range(1, batch.layout.sequence[row].max() + 1):
                text = decode(batch.tokens[row][batch.layout.sequence[row] == number])
                own.append(text.split("<|assistant|>")[0])
        questions.append(own)
    assert questions[0] == questions[1] and len(questions[0]) > 2
    assert batches[0].layout.branch.any() and not batches[1].layout.branch.any()


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


def test_targets_belong_to_their_parts(small_lm: LanguageModel) -> None:
    item = example(small_lm.codec, small_lm.tokenizer, problem(3, False, "records", "conclusion"), structured=True)
    batch = pack([item], [0], small_lm.codec.special, 1, 448, "sequential")
    special = small_lm.special_tokens
    assert special is not None
    expected, part = [], 0
    for token in item.tokens:
        part = {special.title_start: 1, special.branch_start: 2}.get(int(token), part)
        expected.append(part)
        part = 0 if token in (special.title_end, special.branch_end) else part
    assert batch.part[0, : len(expected)].tolist() == expected and set(expected) == {0, 1, 2}


CONFIGS: dict[str, type] = {
    "data": DataConfig,
    "configs/ablation": AblationConfig,
    "eval": EvalConfig,
    "eval_7b": EvalConfig,
    "eval_embedded": EvalConfig,
}
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_shipped_configs_load(file: Path) -> None:
    kind = CONFIGS.get(file.stem, CONFIGS.get(f"{file.parent.name}/{file.stem}", TrainConfig))
    config = read_config(kind, file)
    assert isinstance(config, kind)
    if isinstance(config, EvalConfig):
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
        ("model: {weights: int8}", [], "expected model.checkpoint and model.lora_rank"),
        ("model: {checkpoint: x}", [], "model.checkpoint: expected data.train"),
        ("model: {heads: 4, kv_heads: 3}", [], r"model.heads: expected a multiple of model.kv_heads \(3\), got 4"),
        ("", ["data.train=[a.jsonl]"], "steps: expected steps, or epochs"),
        ("", ["data.train=[a.jsonl]", "data.held_out=[b.jsonl, a.jsonl]", "epochs=1"], "got 'a.jsonl' in both"),
        ("steps: 0", [], "steps: expected steps, or epochs and data.train"),
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
        ("steps: [", [], "config.yaml: "),
        ("- 1", [], "expected `key: value` lines, got list"),
        ("", ["steps"], "expected key=value, got 'steps'"),
    ],
)
def test_config_errors_name_file_and_field(text: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.yaml", overrides)


def test_configs_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes("model: {checkpoint: café}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.yaml: unacceptable character #x00e9"):
        load_config(file)
    file.write_bytes("steps: 1\ndata: {train: é, cache: é}\nmodel: {checkpoint: &name é}".encode())
    assert load_config(file).data.train == (load_config(file).model.checkpoint,) == ("é",)


def test_config_reads_overrides_and_exponents(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 7\noptimiser:\n  learning_rate: 3e-4\n  clip: 2\n")
    config = load_config(tmp_path / "config.yaml", ["steps=9", "model.siblings=shared", "optimiser.beta1=0.8"])
    assert (config.steps, config.model.siblings) == (9, "shared")
    assert (config.optimiser.learning_rate, config.optimiser.clip, config.optimiser.beta1) == (3e-4, 2.0, 0.8)
    assert config_from_dict(TrainConfig, json.loads(json.dumps(config.as_dict())), "config.json") == config
    with pytest.raises(ConfigError, match="expected a YAML file, got none"):
        load_config(tmp_path / "none.yaml")
