"""What a judge's verdicts are worth: it judges answers beside worse versions of themselves, which it is not told."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from aspd_jax.pipeline.pieces import piece_starts

CONTROLS = ("cut", "shuffled")
LEAST_PIECES = 4  # of an answer that cutting or shuffling makes worse


class Control(NamedTuple):
    """An answer of a system to a question, and a version of it that is worse."""

    question: Any
    system: str
    name: str
    answer: str
    worse: str


def worse(answer: str, control: str, seed: int) -> str | None:
    """The first half of an answer, or its sentences and lines in another order; None: it is too short for that."""
    edges = [*piece_starts(answer), len(answer)]
    pieces = [answer[start:end] for start, end in pairwise(edges)]
    if len(pieces) < LEAST_PIECES or len(set(pieces)) == 1:
        return None
    if control == "cut":
        return "".join(pieces[: len(pieces) // 2]).rstrip()
    order, chance = list(pieces), random.Random(seed)
    while order == pieces:
        chance.shuffle(order)
    return "\n".join(piece.strip() for piece in order)


def controls_of(
    answers: Sequence[tuple[str, Mapping[Any, Sequence[str]]]], questions: Sequence[Any], count: int
) -> list[Control]:
    """Controls of as many first turns as asked for, of all systems in turn.

    Args:
        answers: by system, the turns of every question.
        questions: their ids.
        count: of answers.
    """
    found: list[Control] = []
    for number, question in enumerate(questions):
        if len(found) < count * len(CONTROLS) and answers:
            system, turns = answers[number % len(answers)]
            answer = turns[question][0] if turns.get(question) else ""
            versions = [(name, worse(answer, name, number)) for name in CONTROLS]
            found += [Control(question, system, name, answer, version) for name, version in versions if version]
    return found


def control_figures(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of every control, shares of judgments; None: nothing was judged so.

    `preferred` and `rejected`: the answer itself, in both orders. `consistent`: the same in both orders. `first`:
    whichever stood first. `higher` and `equal`: its score beside the other's. `again`: the same score when it was asked
    for once more.
    """
    every = list(records)
    found = []
    for control in CONTROLS:
        ours = [record for record in every if record["control"] == control]
        pairs = [(r["g1_winner"], r["g2_winner"]) for r in ours if r["g1_winner"]]
        scores = [(r["score"], r["worse_score"]) for r in ours if r["score"] and r["worse_score"]]
        twice = [(r["score"], r["again"]) for r in ours if r["score"] and r["again"]]
        if ours:
            found.append(
                {
                    "control": control,
                    "answers": len(ours),
                    "preferred": _share(pair == ("model_1", "model_1") for pair in pairs),
                    "rejected": _share(pair == ("model_2", "model_2") for pair in pairs),
                    "consistent": _share(first == second for first, second in pairs),
                    "first": _share(pair == ("model_1", "model_2") for pair in pairs),
                    "higher": _share(score > other for score, other in scores),
                    "equal": _share(score == other for score, other in scores),
                    "again": _share(score == other for score, other in twice),
                }
            )
    return found


def _share(holds: Iterable[bool]) -> float | None:
    values = list(holds)
    return sum(values) / len(values) if values else None
