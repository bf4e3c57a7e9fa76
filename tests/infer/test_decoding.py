"""The decoding matrix: every family and variant that loads, decoded by the engine as `transformers` decodes it.

Vectors: `tests.helpers.make_decoding`. Prompts and answers are longer than sliding windows and original contexts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aspd_jax import LanguageModel, load_model
from aspd_jax.model.cache import Bucket
from aspd_jax.model.config import FAMILIES, RopeConfig
from aspd_jax.model.transformer import Transformer
from aspd_jax.sharding import make_mesh
from infer import Engine, SamplingParams
from infer.scheduling.buckets import Buckets
from tests.conftest import GOLDEN, ROOT, write_checkpoint
from tests.helpers.answers import SEPARATOR, full_pass
from tests.helpers.make_decoding import (
    BRANCH,
    FAMILY_CASES,
    FOLLOW_UP,
    SERIAL,
    SPECIAL,
    VARIANTS,
    prompt_ids,
    question,
    script,
)
from tests.helpers.replay import replay

VECTORS: dict[str, Any] = json.loads((GOLDEN / "decoding.json").read_text())
NAMES = {
    "llama": ("Llama", "SmolLM2", "Vicuna"),
    "mistral": ("Mistral",),
    "qwen2": ("Qwen2", "Qwen2.5"),
    "qwen3": ("Qwen3",),
    "gemma3_text": ("Gemma 3",),
}
families = pytest.mark.parametrize("family", FAMILY_CASES)


def loaded(folder: Path, name: str, **options: Any) -> LanguageModel:
    lm = load_model(write_checkpoint(folder, VARIANTS[name]), **options)
    lm.special_tokens = SPECIAL
    return lm


def engine_for(lm: LanguageModel, **options: Any) -> Engine:
    settings = {"max_length": 128, "max_batch": 1, "max_branches": 3, "max_title_tokens": 2} | options
    return Engine(lm, separator_ids=SEPARATOR, **settings)


def answers(engine: Engine, vector: dict[str, Any]) -> dict[str, list[int]]:
    """Return a serial and an adaptive answer side by side, then a follow-up turn that reuses the cache."""
    seed = vector["seed"]
    ids, length = prompt_ids(seed), len(vector["adaptive"])
    params = [
        SamplingParams(max_new_tokens=SERIAL),
        SamplingParams(max_new_tokens=length, max_branch_tokens=BRANCH, script=script(seed)),
    ]
    serial, adaptive = engine.generate([ids, ids], params, ["serial", "adaptive"])
    history = [*ids, *adaptive.token_ids, *question(seed)]
    follow_up = engine.generate([history], SamplingParams(max_new_tokens=FOLLOW_UP), "serial")[0]
    assert adaptive.stats.blocks == 1
    assert follow_up.stats.reused_tokens >= len(ids) + len(adaptive.token_ids) - 1, (
        "the follow-up turn begins with the cache"
    )
    return {"serial": serial.token_ids, "adaptive": adaptive.token_ids, "follow_up": follow_up.token_ids}


def assert_equal(found: dict[str, list[int]], vector: dict[str, Any]) -> None:
    assert found == {key: vector[key] for key in ("serial", "adaptive", "follow_up")}


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all steps of an engine in one program, which is compiled once."""
    monkeypatch.setattr(Buckets, "buckets", property(lambda self: [Bucket(self.rows, 64, 64, self.capacity, 0)]))
    monkeypatch.setattr(Buckets, "prefill_chunk", lambda self, left: 64)


@pytest.mark.default_cases(len(FAMILY_CASES))
@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("name", dict.fromkeys([*FAMILY_CASES.values(), *VARIANTS]))
def test_answers_equal_transformers(name: str, tmp_path: Path) -> None:
    assert_equal(answers(engine_for(loaded(tmp_path, name)), VECTORS[name]), VECTORS[name])


@pytest.mark.further
@families
def test_batches_equal_transformers(family: str, tmp_path: Path) -> None:
    """In the programs of an ordinary engine: prompts, forks and merges beside serial rows."""
    name = FAMILY_CASES[family]
    assert_equal(answers(engine_for(loaded(tmp_path, name), max_batch=2), VECTORS[name]), VECTORS[name])


@pytest.mark.further
@pytest.mark.usefixtures("one_program")
@families
def test_int8_equals_transformers_with_rounded_weights(family: str, tmp_path: Path) -> None:
    vector = VECTORS[f"{family}_int8"]
    assert_equal(answers(engine_for(loaded(tmp_path, FAMILY_CASES[family], weights="int8")), vector), vector)


def test_rounding_to_int8_changes_answers() -> None:
    """Negative control: vectors of float weights are other answers to the same prompts."""
    pairs = [(VECTORS[f"{family}_int8"], VECTORS[name]) for family, name in FAMILY_CASES.items()]
    assert sum(rounded != plain for rounded, plain in pairs if rounded["seed"] == plain["seed"]) >= 3


@pytest.mark.further
@pytest.mark.usefixtures("one_program")
@families
def test_drafts_change_no_answer(family: str, tmp_path: Path) -> None:
    name = FAMILY_CASES[family]
    engine = engine_for(loaded(tmp_path, name), drafts="lookup", draft_tokens=3, force_drafts=True)
    assert_equal(answers(engine, VECTORS[name]), VECTORS[name])
    drafted = engine.generate([prompt_ids(0)], SamplingParams(max_new_tokens=60), "serial")[0]
    assert drafted.stats.drafted_tokens > 0


@pytest.mark.default_cases(1)
@pytest.mark.several
@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("name", [*FAMILY_CASES.values(), "llama_one_kv_head"])
def test_a_mesh_changes_no_answer(name: str, tmp_path: Path) -> None:
    """Rows over `data`, parameters over `fsdp`, heads over `tensor`; of one kv head, parts."""
    lm = loaded(tmp_path, name, mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert_equal(answers(engine_for(lm, max_batch=4), VECTORS[name]), VECTORS[name])


BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "no window": ("mistral_window", {"windows": ()}),
    "window too long": ("mistral_window", {"windows": (6,) * 4}),
    "ropes exchanged": ("gemma3", {"rope": RopeConfig(theta=20.0), "window_rope": RopeConfig(theta=500.0)}),
    "one rope": ("gemma3", {"window_rope": None}),
    "linear scaling dropped": ("llama_linear", {"rope": RopeConfig()}),
    "llama3 scaling dropped": ("llama_llama3", {"rope": RopeConfig()}),
    "yarn scaling dropped": ("qwen2_yarn", {"rope": RopeConfig()}),
    "another position scheme": ("llama_max_positions", {"positions": "sequential"}),
}


@pytest.mark.default_cases(1)
@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(
            broken, marks=[pytest.mark.slow] * (broken not in ("no window", "yarn scaling dropped", "one rope"))
        )
        for broken in BROKEN
    ],
)
def test_a_model_that_is_wrong_gives_other_answers(broken: str, tmp_path: Path) -> None:
    """Negative controls."""
    name, changes = BROKEN[broken]
    lm = loaded(tmp_path, name)
    config = replace(lm.config, **changes)
    assert config != lm.config
    found = answers(engine_for(replace(lm, config=config, model=Transformer(config))), VECTORS[name])
    assert found != {key: VECTORS[name][key] for key in found}


@pytest.mark.further
@pytest.mark.parametrize("name", ["mistral_window", "gemma3"])
def test_max_positions_with_a_window(name: str, tmp_path: Path) -> None:
    """Stepwise logits equal those of a full pass, as training computes them."""
    lm = loaded(tmp_path, name)
    config = replace(lm.config, positions="max")
    engine = engine_for(replace(lm, config=config, model=Transformer(config)))
    ids, answer = prompt_ids(1), VECTORS[name]["adaptive"]
    logits = replay(engine, ids, answer).logits
    np.testing.assert_allclose(logits, full_pass(engine.lm, SPECIAL, ids, answer), atol=1e-4)
    assert np.abs(logits - full_pass(lm, SPECIAL, ids, answer)).max() > 1e-2, "negative control: another scheme"


def test_every_supported_family_is_in_the_matrix() -> None:
    """`FAMILIES`, this matrix and the lists in README.md and docs/porting.md name the same families."""
    assert {case["model_type"] for case in VARIANTS.values()} == set(FAMILIES) == set(FAMILY_CASES) == set(NAMES)
    assert {"vicuna", "smollm2"} < set(VARIANTS)
    names = [name for family in NAMES.values() for name in family]
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    for page in ("README.md", "docs/porting.md"):
        assert listed in " ".join((ROOT / page).read_text().split()), f"{page} lists other families"
