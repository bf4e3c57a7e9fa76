"""The weights that ship with the package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from aspd_jax import load_model
from aspd_jax.formats import ADAPTED, EMBEDDED
from infer.engine import Engine
from infer.evaluation.config import DecodingSection, System
from infer.evaluation.conversations import answer_questions
from tests.conftest import ROOT
from tests.helpers.tasks import held_out, synthetic_questions

WEIGHTS = (".safetensors", ".gguf", ".npz", ".npy", ".bin", ".msgpack")
MOST = 25_000_000  # bytes of weights in the wheel and in a clone
MAX_OF_ALL = 40_000_000  # bytes of all files in a clone


def test_weights_are_bounded() -> None:
    """Check that git tracks one model, one adapter and its draft heads, within a maximum size."""
    command = ["git", "ls-files", "-co", "-z", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    sizes = {name: (ROOT / name).stat().st_size for name in listed if name and (ROOT / name).is_file()}
    weights = {name: size for name, size in sizes.items() if name.endswith(WEIGHTS)}
    large = {name for name, size in weights.items() if size > 1_000_000}
    assert large == {f"aspd_jax/embedded/{folder}/model.safetensors" for folder in EMBEDDED.values()} | {
        f"aspd_jax/adapters/{name}/{file}.safetensors" for name in ADAPTED for file in ("adapter_model", "draft_heads")
    }
    assert 10_000_000 < sum(weights.values()) <= MOST
    assert sum(sizes.values()) <= MAX_OF_ALL


@pytest.mark.further
def test_the_model_answers_rightly_and_forks_where_it_should(tmp_path: Path) -> None:
    """Check a small sample of the figures in docs/embedded_models.md."""
    questions = synthetic_questions(12)
    engine = Engine(load_model("demo"), max_length=1024, max_batch=1)
    system = System("demo", "demo", "adaptive")
    records = answer_questions(engine, system, questions, DecodingSection(), tmp_path / "answers.jsonl", "demo")
    assert [record["turns"][0]["stats"]["blocks"] > 0 for record in records] == [q.forks for q in questions]
    texts = [record["turns"][0]["text"].strip() for record in records]
    assert sum(text == item.answer.strip() for text, item in zip(texts, held_out(12), strict=True)) >= 11
