"""Ablation after the paper's: one model fine-tuned with each mask, position scheme and quality of data.

The base model answers the synthetic tasks plainly. It is fine-tuned on plain answers (Seq) and on structured answers
(ASPD) to the same problems with equal settings, and the models are compared by the likelihood of held-out answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from aspd_jax.configuration import at_least
from aspd_jax.errors import ConfigError
from aspd_jax.files import replacing
from aspd_jax.layout import PositionScheme, Siblings
from aspd_jax.structure import Branch, Parallel, Serial, Structure
from train.batches import PARTS
from train.config import DataSection, ModelSection, OptimiserSection, TrainConfig
from train.tasks import Problem, conversation, held_out, problem

Quality = Literal["verified", "unverified", "random"]


class Variant(NamedTuple):
    """Fine-tuning of the base model.

    Attributes:
        structured: whether answers are structured (ASPD) or plain (Seq).
        positions: position scheme.
        siblings: mask between sibling branches.
        quality: structure of answers: `verified` (that of the tasks), `unverified` (every line is a branch), `random`
            (cut between random words).
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


@dataclass(frozen=True)
class AblationConfig:
    """Configuration of an ablation.

    Attributes:
        base: checkpoint folder of the base model, trained on plain answers to the synthetic tasks.
        variants: names of variants; empty: all.
        seed: seed of the data order.
        conversations: number of training conversations.
        steps, learning_rate, rows, length: settings of every run; see `TrainConfig`.
        problems: number of held-out problems.
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

    def __post_init__(self) -> None:
        if not self.base:
            raise ConfigError("base: expected the folder of a checkpoint, got none. See configs/ablation.yaml for one.")
        for name in ("conversations", "steps", "rows", "length", "problems"):
            at_least(name, getattr(self, name), 1)
        for name in self.variants:
            if name not in VARIANTS:
                raise ConfigError(f"variants: expected names from {', '.join(VARIANTS)}, got {name!r}")

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the variants to train."""
        return self.variants or tuple(VARIANTS)


def run_config(config: AblationConfig, variant: Variant, folder: Path) -> TrainConfig:
    """Return the training configuration of a variant; its data is written to `folder` unless it is there."""
    training = (problem(seed, held_out=False) for seed in range(config.conversations))
    file = folder / f"{variant.quality}_{config.conversations}.jsonl"
    held_out_file = folder / f"held_out_{config.problems}.jsonl"
    return TrainConfig(
        model=ModelSection(
            checkpoint=config.base, positions=variant.positions, siblings=variant.siblings, titles="names"
        ),
        data=DataSection(
            train=(write_conversations(file, training, variant.quality),),
            held_out=(write_conversations(held_out_file, held_out(config.problems), "verified"),),
            structured=variant.structured,
            rows=config.rows,
            length=config.length,
        ),
        optimiser=OptimiserSection(learning_rate=config.learning_rate, warmup=0.1),
        steps=config.steps,
        seed=config.seed,
        save_every=100,
        keep=1,
        evaluate_batches=config.problems,
    )


def write_conversations(file: Path, problems: Iterable[Problem], quality: Quality) -> str:
    """Write problems with structure of this quality as training data, unless the file exists, and return its name."""
    if not file.exists():
        with replacing(file) as out:
            out.writelines(json.dumps(conversation(item, RESTRUCTURE[quality](item))) + "\n" for item in problems)
    return str(file)


def loss_table(runs: Mapping[str, Path]) -> str:
    """Return a Markdown table of the held-out losses at the end of runs, by name and folder; nats per token."""
    lines = ["| model | all | serial text | titles | branches |", "|---" * (2 + len(PARTS)) + "|"]
    for name, run in runs.items():
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        losses = [last["held_out_loss"], *(last[f"held_out_loss_{part}"] for part in PARTS)]
        lines.append(f"| {' | '.join([name, *(f'{loss:.3f}' for loss in losses)])} |")
    return "\n".join(lines)


def every_line(item: Problem) -> Structure:
    """Return the structure that unverified extraction gives: every line after the first is a branch."""
    titles = {
        branch.text: branch.title for part in item.structure if isinstance(part, Parallel) for branch in part.branches
    }
    intro, *lines = item.answer.splitlines(keepends=True)
    if len(lines) < 2:
        return (Serial(item.answer),)
    return (Serial(intro), Parallel([Branch(titles.get(line) or _lead(line), line) for line in lines]))


def cut_anywhere(item: Problem) -> Structure:
    """Cut an answer between random words into three to six pieces; all but the first are branches."""
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
    """Return a title: the text before a colon, or the first two words."""
    before, colon, _ = text.strip().partition(":")
    return before if colon and "\n" not in before else " ".join(text.split()[:2])


RESTRUCTURE: dict[Quality, Callable[[Problem], Structure]] = {
    "verified": lambda item: item.structure,
    "unverified": every_line,
    "random": cut_anywhere,
}
