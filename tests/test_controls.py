"""Answers beside worse versions of themselves: how much a judge's verdicts are worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax.store import Store
from infer.evaluation.config import BenchmarkSection, EvalConfig, JudgeSection, ModelSection
from infer.evaluation.controls import control_figures, worse
from infer.evaluation.judge import Answers, judge
from infer.evaluation.questions import Question
from tests.teacher_server import Reply, TeacherServer, section

LONG = " ".join(f"This is sentence number {n} of the answer." for n in range(8))


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["Buy a small boat now. ", "Sell it for more. ", "\n", "- one thing\n"]), max_size=12),
    st.integers(0, 9),
)
def test_worse_versions_are_made_of_the_answer(parts: list[str], seed: int) -> None:
    answer = "".join(parts)
    cut, shuffled = worse(answer, "cut", seed), worse(answer, "shuffled", seed)
    assert (cut is None) == (shuffled is None)
    if cut is not None and shuffled is not None:
        assert answer.startswith(cut) and 0 < len(cut) < len(answer)
        assert "".join(shuffled.split()) != "".join(answer.split()) or shuffled.split() == answer.split()
        assert sorted(shuffled.split()) == sorted(answer.split())


def test_shuffling_changes_the_order() -> None:
    assert worse(LONG, "shuffled", 3) != LONG.replace(". ", ".\n") and worse("Short.", "cut", 0) is None


@pytest.mark.parametrize(
    "kind, preferred, rejected, first, higher",
    [("fair", 1.0, 0.0, 0.0, 1.0), ("first", 0.0, 0.0, 1.0, 0.0), ("contrary", 0.0, 1.0, 0.0, 0.0)],
)
def test_controls_tell_what_a_judge_is_worth(
    kind: str, preferred: float, rejected: float, first: float, higher: float, tmp_path: Path
) -> None:
    """A judge that sees which answer is whole, one that takes the first, and one that takes the worse."""

    def whole(text: str) -> bool:
        return "\n" not in text.strip() and "number 7" in text

    def answer(body: dict[str, Any], before: int) -> Reply:
        prompt = body["messages"][-1]["content"]
        if "<assistant_a>" not in prompt:
            good = whole(section(prompt, "answer"))
            return 200, json.dumps(
                {"explanation": "", "rating": 5 if kind == "first" else 9 if good == (kind == "fair") else 3}
            )
        a = whole(section(prompt, "assistant_a"))
        return 200, json.dumps({"explanation": "", "winner": "A" if kind == "first" or a == (kind == "fair") else "B"})

    questions = [Question(id=n, category="writing", turns=(f"Question {n}?",)) for n in range(3)]
    answers = [Answers("ours", {0: [LONG], 1: ["Short."], 2: [LONG]}), Answers("theirs", {0: [LONG], 2: [LONG]})]
    with TeacherServer(answer) as server:
        models = {"ours": ModelSection(path="demo", role="ori"), "theirs": ModelSection(path="demo", role="ori")}
        benchmarks = {"b": BenchmarkSection(kind="synthetic")}
        section_ = JudgeSection(base_url=server.url, model="j", single=False, controls=2)
        store = Store(tmp_path / "judge.db")
        found = judge(EvalConfig(models=models, benchmarks=benchmarks, judge=section_), questions, answers, store)
        store.close()
    assert not found.single and {c["control"] for c in found.controls} == {"cut", "shuffled"}
    assert [c["question_id"] for c in found.controls] == [0, 0, 2, 2]  # one of them is too short
    for of in control_figures(found.controls):
        assert of["answers"] == 2 and of["again"] == 1.0
        assert (of["preferred"], of["rejected"], of["first"], of["higher"]) == (preferred, rejected, first, higher)
        assert of["equal"] == (1.0 if kind == "first" else 0.0) and of["consistent"] == (
            0.0 if kind == "first" else 1.0
        )
