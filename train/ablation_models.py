"""The paper's ablation in kind: one model fine-tuned with every mask, position scheme and quality of data.

The base model answers the synthetic tasks plainly (Ori). It is fine-tuned on plain answers (Seq) and on structured ones
(ASPD) of the same problems, with everything else the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from aspd_jax.configuration import at_least
from aspd_jax.errors import ConfigError
from aspd_jax.files import replacing
from aspd_jax.layout import PositionScheme, Siblings
from aspd_jax.structure import Branch, Parallel, Serial, Structure
from train.tasks import Problem, conversation, problem
from train.train_config import DataSection, ModelSection, OptimiserSection, TrainConfig

Quality = Literal["verified", "unverified", "random"]
# No branch of the tasks that `problem` draws from is longer. `predict` spaces branches by the longest that the limits
# allow, and was trained on spacings of this order.
MAX_BRANCH_TOKENS = 64


class Variant(NamedTuple):
    """What is done to the base model.

    Attributes:
        structured: ASPD; else Seq.
        quality: of the structure: the tasks' own; every line a branch, needed by another one or not; cut anywhere.
    """

    structured: bool
    positions: PositionScheme = "sequential"
    siblings: Siblings = "invisible"
    quality: Quality = "verified"


VARIANTS = {
    "seq": Variant(False),
    "aspd": Variant(True),
    "sequential-shared": Variant(True, "sequential", "shared"),
    "max-invisible": Variant(True, "max", "invisible"),
    "max-shared": Variant(True, "max", "shared"),
    "predict-invisible": Variant(True, "predict", "invisible"),
    "unverified": Variant(True, quality="unverified"),
    "random": Variant(True, quality="random"),
}
REFERENCE = "aspd"


@dataclass(frozen=True)
class AblationConfig:
    """An ablation.

    Attributes:
        base: folder of the checkpoint that is fine-tuned: a model trained on plain answers to the synthetic tasks.
        variants: which ones; none: all.
        seed: of the order of data.
        conversations: to train on.
        steps, learning_rate, rows, length: of every run; see `TrainConfig`.
        problems: held-out problems that every model answers, greedily.
        batch: problems that are decoded together.
    """

    base: str = ""
    variants: tuple[str, ...] = ()
    seed: int = 0
    conversations: int = 4000
    steps: int = 300
    learning_rate: float = 1e-3
    rows: int = 6
    length: int = 448
    problems: int = 240
    batch: int = 16

    def __post_init__(self) -> None:
        if not self.base:
            raise ConfigError("base: expected the folder of a checkpoint, got none. See configs/ablation.yaml for one.")
        for name in ("conversations", "steps", "rows", "length", "problems", "batch"):
            at_least(name, getattr(self, name), 1)
        for name in self.variants:
            if name not in VARIANTS:
                raise ConfigError(f"variants: {name!r} is none of {', '.join(VARIANTS)}")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The variants that are trained."""
        return self.variants or tuple(VARIANTS)


def run_config(config: AblationConfig, variant: Variant, file: Path) -> TrainConfig:
    """The training run of a variant on a file of `write_conversations`."""
    return TrainConfig(
        model=ModelSection(checkpoint=config.base, positions=variant.positions, siblings=variant.siblings),
        data=DataSection(train=(str(file),), structured=variant.structured, rows=config.rows, length=config.length),
        optimiser=OptimiserSection(learning_rate=config.learning_rate, warmup=0.1),
        steps=config.steps,
        seed=config.seed,
        save_every=100,
        keep=1,
    )


def write_conversations(folder: Path, quality: Quality, count: int) -> Path:
    """Training conversations of the synthetic tasks as JSONL, if they are not there yet."""
    file = folder / f"{quality}_{count}.jsonl"
    if not file.exists():
        with replacing(file) as out:
            for seed in range(count):
                item = problem(seed, held_out=False)
                out.write(json.dumps(conversation(item, RESTRUCTURE[quality](item))) + "\n")
    return file


def every_line(item: Problem) -> Structure:
    """What comes of form without verification: every line after the first is a branch."""
    titles = {
        branch.text: branch.title for part in item.structure if isinstance(part, Parallel) for branch in part.branches
    }
    intro, *lines = item.answer.splitlines(keepends=True)
    if len(lines) < 2:
        return (Serial(item.answer),)
    return (Serial(intro), Parallel([Branch(titles.get(line) or _lead(line), line) for line in lines]))


def cut_anywhere(item: Problem) -> Structure:
    """Three to six pieces between any two words; all but the first are branches."""
    words = item.answer.split(" ")
    random = Random(hashlib.sha256(item.question.encode()).digest())
    count = random.randint(3, 6)
    if len(words) < 2 * count:
        return (Serial(item.answer),)
    cuts = sorted(random.sample(range(1, len(words)), count - 1))
    pieces = [" ".join(words[a:b]) for a, b in zip([0, *cuts], [*cuts, len(words)], strict=True)]
    pieces = [piece + " " for piece in pieces[:-1]] + pieces[-1:]
    return (Serial(pieces[0]), Parallel([Branch(_lead(piece), piece) for piece in pieces[1:]]))


def _lead(text: str) -> str:
    """A title: what stands before a colon, or the first two words."""
    before, colon, _ = text.strip().partition(":")
    return before if colon and "\n" not in before else " ".join(text.split()[:2])


def _own(item: Problem) -> Structure:
    return item.structure


RESTRUCTURE: dict[Quality, Callable[[Problem], Structure]] = {
    "verified": _own,
    "unverified": every_line,
    "random": cut_anywhere,
}
