"""Exact match and fork decisions on problems with one right answer, by real decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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


def evaluate(
    lm: LanguageModel, problems: Sequence[Problem], batch: int, name: str, max_branch_tokens: int = 1024
) -> list[dict[str, Any]]:
    """Answer problems greedily in adaptive mode; one record per problem.

    Args:
        max_branch_tokens: see `SamplingParams`; in the position scheme `predict` it spaces the branches.
    """
    engine = Engine(lm, max_batch=batch)
    params = SamplingParams(max_new_tokens=1024, max_branch_tokens=max_branch_tokens)
    handles = [engine.submit([{"role": "user", "content": problem.question}], params) for problem in problems]
    records = []
    for problem, handle in zip(problems, tqdm(handles, desc=name, unit="answer"), strict=True):
        result = handle.wait()
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


class Summary(NamedTuple):
    """Of a group of records: how many, shares of exact answers and right fork decisions, and ideal speed-up."""

    problems: int
    exact: float
    fork_right: float
    ideal_speedup: float


def summarise(records: Sequence[Mapping[str, Any]]) -> Summary:
    """What records of `evaluate` say together; the speed-up is that of all their content over all their paths."""
    count = max(1, len(records))
    return Summary(
        problems=len(records),
        exact=sum(r["exact"] for r in records) / count,
        fork_right=sum(r["forked"] == r["should_fork"] for r in records) / count,
        ideal_speedup=sum(r["content_tokens"] for r in records) / max(1, sum(r["critical_path"] for r in records)),
    )


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
    of = summarise(records)
    fork = f"{100 * of.fork_right:.1f} %" if forks else "(never forks)"
    return f"| {name} | {family} | {kind} | {of.problems} | {100 * of.exact:.1f} % | {fork} | {of.ideal_speedup:.2f}x |"
