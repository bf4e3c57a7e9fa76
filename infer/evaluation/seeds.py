"""Models that were trained several times: means over seeds, their spread, and differences from one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from infer.evaluation.intervals import Difference, difference

Records = Sequence[Mapping[str, Any]]


class Spread(NamedTuple):
    """Mean over seeds, lowest and highest seed."""

    mean: float
    low: float
    high: float


class Comparison(NamedTuple):
    """What one kind of model does, over its seeds.

    Attributes:
        seeds: how many.
        forks: whether any answer has a block.
        exact: share of right answers, and `exact_blocks` of those that should have a block.
        fork_right: share of answers that fork exactly where they should.
        ideal: content tokens of all answers by their critical paths.
        beside: of right answers, less those of the reference: paired by question, means over seeds.
    """

    seeds: int
    forks: bool
    exact: Spread
    exact_blocks: Spread
    fork_right: Spread
    ideal: Spread
    beside: Difference | None


def compare(models: Mapping[str, Sequence[Records]], reference: str) -> dict[str, Comparison]:
    """Of every kind of model, given the records of its seeds (`infer.evaluation.answers`), on the same questions."""
    return {
        name: Comparison(
            seeds=len(seeds),
            forks=any(forked(record) for records in seeds for record in records),
            exact=_spread(seeds, _share(lambda record: bool(record["correct"]))),
            exact_blocks=_spread(seeds, _share(lambda record: bool(record["correct"]), blocks=True)),
            fork_right=_spread(seeds, _share(lambda record: forked(record) == record["forks"])),
            ideal=_spread(seeds, ideal_speedup),
            beside=None
            if name == reference or reference not in models
            else difference(_by_question(seeds), _by_question(models[reference])),
        )
        for name, seeds in models.items()
    }


def forked(record: Mapping[str, Any]) -> bool:
    """Whether an answer has a block."""
    return any(turn["stats"]["blocks"] for turn in record["turns"])


def ideal_speedup(records: Records) -> float:
    """Content tokens of all answers by their critical paths."""
    stats = [turn["stats"] for record in records for turn in record["turns"]]
    return sum(s["content_tokens"] for s in stats) / max(1, sum(s["critical_path"] for s in stats))


def _share(holds: Callable[[Mapping[str, Any]], bool], blocks: bool = False) -> Callable[[Records], float]:
    def of(records: Records) -> float:
        some = [holds(record) for record in records if record["forks"] or not blocks]
        return sum(some) / max(1, len(some))

    return of


def _spread(seeds: Sequence[Records], of: Callable[[Records], float]) -> Spread:
    values = [of(records) for records in seeds]
    return Spread(float(np.mean(values)), min(values), max(values))


def _by_question(seeds: Sequence[Records]) -> list[float]:
    """Share of seeds that are right, by question; records are kept in the order in which they ended."""
    in_order = [sorted(records, key=lambda record: record["question_id"]) for records in seeds]
    return np.mean([[bool(record["correct"]) for record in records] for records in in_order], axis=0).tolist()


def table(compared: Mapping[str, Comparison], beside: Mapping[str, Sequence[str]], titles: Sequence[str]) -> str:
    """Markdown.

    Args:
        beside: further cells of every row, and `titles` of theirs.
    """
    names = ["model", "seeds", "exact match", "of answers with a block", "fork decision right", "ideal speed-up"]
    names += ["exact match less reference", "p", *titles]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name, of in compared.items():
        cells = [name, str(of.seeds), _percent(of.exact), _percent(of.exact_blocks)]
        cells.append(_percent(of.fork_right) if of.forks else "(never forks)")
        cells.append(f"{of.ideal.mean:.2f}x")
        if of.beside is None:
            cells += ["", ""]
        else:
            d = of.beside
            cells += [f"{100 * d.mean:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]", f"{d.p:.4f}"]
        lines.append(f"| {' | '.join([*cells, *beside.get(name, [''] * len(titles))])} |")
    return "\n".join(lines)


def _percent(of: Spread) -> str:
    around = f" ({100 * of.low:.1f} - {100 * of.high:.1f})" if of.high > of.low else ""
    return f"{100 * of.mean:.1f} %{around}"
