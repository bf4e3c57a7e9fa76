"""Exact match and fork decisions on problems with one right answer, by real decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from aspd_jax.language_model import LanguageModel
from infer.engine import Engine
from infer.request import SamplingParams


class Problem(Protocol):
    """What is asked, the one right answer, and whether that answer has a block."""

    @property
    def family(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def forks(self) -> bool: ...


def evaluate(lm: LanguageModel, problems: Sequence[Problem], batch: int, name: str) -> list[dict[str, Any]]:
    """Answer problems greedily in adaptive mode; one record per problem."""
    engine = Engine(lm, max_batch=batch)
    params = SamplingParams(max_new_tokens=1024)
    records = []
    for first in tqdm(range(0, len(problems), batch), desc=name, unit="batch"):
        some = problems[first : first + batch]
        prompts = [[{"role": "user", "content": problem.question}] for problem in some]
        for problem, result in zip(some, engine.generate(prompts, params), strict=True):
            records.append(
                {
                    "family": problem.family,
                    "kind": problem.kind,
                    "question": problem.question,
                    "expected": problem.answer,
                    "answer": result.text,
                    "exact": result.text == problem.answer,
                    "forked": result.stats.blocks > 0,
                    "should_fork": problem.forks,
                    "content_tokens": result.stats.content_tokens,
                    "critical_path": result.stats.critical_path,
                    "passes": result.stats.passes,
                }
            )
    return records


def table(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: exact match, right fork decisions and ideal speed-up, by model, family and kind."""
    lines = [
        "| model | family | kind | problems | exact match | fork decision right | ideal speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, records in models.items():
        groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for record in records:
            groups[record["family"], record["kind"]].append(record)
        forks = any(record["forked"] for record in records)
        for (family, kind), some in sorted(groups.items()):
            lines.append(_row(name, family, kind, some, forks))
        lines.append(_row(name, "all", "all", list(records), forks))
    return "\n".join(lines)


def _row(name: str, family: str, kind: str, records: Sequence[Mapping[str, Any]], forks: bool) -> str:
    def share(values: Iterable[bool]) -> str:
        return f"{100 * sum(values) / len(records):.1f} %"

    exact = share(record["exact"] for record in records)
    fork = share(record["forked"] == record["should_fork"] for record in records) if forks else "(never forks)"
    ideal = sum(r["content_tokens"] for r in records) / max(1, sum(r["critical_path"] for r in records))
    return f"| {name} | {family} | {kind} | {len(records)} | {exact} | {fork} | {ideal:.2f}x |"
