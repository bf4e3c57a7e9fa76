"""Decisions of a model on JevBench: right answers, flips under reversal, and calibration, with and without orders.

    python -m tests.helpers.decision_quality run MODEL FILE [--minutes N]   # resumes; needs the package jevbench
    python -m tests.helpers.decision_quality table FILE...

JevBench has no answers. Those in `decision_labels.json` were given by hand, by reading its first two cases of each
domain: all predicates, and the choices that the case states.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aspd_jax.journal import read_journal
from infer.decisions import MAX_ORDERS, NO_THOUGHT, Option, Question, decide, read_labels
from infer.evaluation.intervals import interval

LABELS = Path(__file__).with_name("decision_labels.json")
LEAST = 5  # questions of a type in the table
TYPES = {"noul": "predicates", "choice": "choices", "score": "scores"}


def answers(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, tuple[dict[str, Any], int]]]:
    """Return questions in JevBench's form with the index of the right option, by case and name."""
    found: dict[str, dict[str, tuple[dict[str, Any], int]]] = {}
    for id, right in json.loads(LABELS.read_text()).items():
        asked = cases[id]["questions"]
        found[id] = {name: (asked[name], number) for number, key in enumerate(("true", "false")) for name in right[key]}
        for name, value in right["choices"].items():
            found[id][name] = asked[name], list(asked[name]["criteria"]).index(value)
    return found


def _cases() -> dict[str, dict[str, Any]]:
    file = Path(str(importlib.import_module("jevbench").__file__)).parent / "suites" / "jevbench-240" / "cases.jsonl"
    return {row["id"]: row for row in map(json.loads, file.read_text().splitlines())}


def question(asked: dict[str, Any]) -> Question:
    """Return a question of JevBench."""
    if asked["type"] == "noul":
        return Question("predicate", asked["instructions"])
    criteria = asked["criteria"]
    pairs = criteria.items() if asked["type"] == "choice" else [(level, "") for level in criteria]
    return Question(asked["type"], asked["instructions"], tuple(Option(value, text) for value, text in pairs))


def run(model: str, file: Path, minutes: float) -> None:
    """Append the log probabilities of all orders, and of the reversed one, to a file; those it has are not repeated."""
    from aspd_jax import load_model
    from aspd_jax.chat import encode_questions
    from infer import Engine

    records = read(file)
    done, priors = {(r["id"], r["name"]) for r in records}, {json.dumps(r["asked"]): r["prior"] for r in records}
    lm = load_model(model)
    engine, codec, begun = Engine(lm, max_length=4096, max_batch=1), lm.codec.text, time.monotonic()
    cases = _cases()
    right = answers(cases)

    def logprobs(text: str, asked: Sequence[dict[str, Any]]) -> list[list[list[float]]]:
        """Return those of the options by question and order; the last order is the reversed one."""
        shown = []
        for one in map(question, asked):
            variants = one.variants(MAX_ORDERS)
            if one.options:
                ((turned, names),) = Question(one.kind, one.instructions, one.options[::-1]).variants(1)
                variants.append((turned, names[::-1]))
            shown.append(variants)
        texts = [f"\n\n{text}" for variants in shown for text, _ in variants]
        message = {"role": "user", "content": text}
        shared, leads = encode_questions(lm.tokenizer, codec, [message], texts, NO_THOUGHT)
        rest = iter(leads)
        labels = [[read_labels(codec, next(rest), names) for _, names in variants] for variants in shown]
        scores = iter(
            engine.score(shared, [branch for orders in labels for order in orders for branch in order.branches])
        )
        return [[order.read(scores).tolist() for order in orders] for orders in labels]

    with file.open("a") as log:
        for id in right:
            todo = {name: pair for name, pair in right[id].items() if (id, name) not in done}
            if not todo or time.monotonic() - begun > 60 * minutes:
                continue
            unknown = [asked for asked, _ in todo.values() if json.dumps(asked) not in priors]
            main = logprobs(cases[id]["state"], [asked for asked, _ in todo.values()])
            if unknown:
                priors |= zip(map(json.dumps, unknown), logprobs("N/A", unknown), strict=True)
            for (name, (asked, index)), values in zip(todo.items(), main, strict=True):
                record = {"id": id, "name": name, "asked": asked, "right": index, "main": values}
                log.write(json.dumps(record | {"prior": priors[json.dumps(asked)]}) + "\n")
            log.flush()


def read(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file, but for a last line that was cut."""
    return list(read_journal(file))


def rows(records: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the table: type, number, way, share of right answers, AUROC, NLL, calibration error, flips."""
    for kind, name in TYPES.items():
        own = [record for record in records if record["asked"]["type"] == kind]
        if len(own) < LEAST:
            continue
        right = np.asarray([record["right"] for record in own])
        chance = np.mean([1 / len(record["main"][0]) for record in own])
        turned = -1  # of predicates, the second order is the reversed one
        ways: dict[str, list[tuple[Any, Any]]] = {
            "given order": [(r["main"][:1], None) for r in own],
            "reversed": [(r["main"][turned:], None) for r in own],
            "`orders`": [(_orders(r["main"], kind), None) for r in own],
            "`prior`": [(_orders(r["main"], kind), _orders(r["prior"], kind)) for r in own],
        }
        given = np.asarray([])
        for way, pairs in ways.items():
            found = [decide(np.asarray(main), None if prior is None else np.asarray(prior)) for main, prior in pairs]
            best = np.asarray([one.best for one in found])
            given = best if way == "given order" else given
            hits, confidence = best == right, np.asarray([one.confidence for one in found])
            share = interval(hits.astype(float).tolist())
            nll = -np.mean([np.log(max(one.probabilities[k], 1e-12)) for one, k in zip(found, right, strict=True)])
            flips = _percent(np.mean(best != given)) if way == "reversed" else ""
            yield [
                f"{len(own)} {name} (chance {_percent(chance)})" if way == "given order" else "", way,
                f"{_percent(share.mean)} ({100 * share.low:.0f} to {100 * share.high:.0f})", flips,
                _auroc(found, right, kind),
                f"{nll:.2f}",
                f"{calibration_error(confidence, hits):.2f}",
            ]  # fmt: skip


def _percent(share: Any) -> str:
    return f"{100 * share:.0f} %"


def _orders(values: list[Any], kind: str) -> list[Any]:
    """Return the orders without the reversed one, which is a rotation of predicates only."""
    return values if kind == "noul" else values[:-1]


def calibration_error(confidence: np.ndarray, hits: np.ndarray) -> float:
    """Return the expected calibration error over ten bins of equal width."""
    bins = np.ceil(confidence * 10)
    return float(
        sum(np.mean(bins == k) * abs(confidence[bins == k].mean() - hits[bins == k].mean()) for k in set(bins))
    )


def _auroc(found: Sequence[Any], right: np.ndarray, kind: str) -> str:
    if kind != "noul" or len(set(right.tolist())) < 2:
        return ""
    true = np.asarray([one.probabilities[0] for one in found])
    above = true[right == 0][:, None] - true[right == 1][None]
    return f"{np.mean((above > 0) + 0.5 * (above == 0)):.2f}"


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the figures of a model as a table."""
    head = ["", "", "right (95 %)", "flips", "AUROC", "NLL", "calibration error"]
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows(records))]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, dest="what")
    one = kinds.add_parser("run")
    one.add_argument("model")
    one.add_argument("file", type=Path)
    one.add_argument("--minutes", type=float, default=1e6)
    kinds.add_parser("table").add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.what == "run":
        run(options.model, options.file, options.minutes)
        return
    for file in options.files:
        print(f"{file.stem}: {len({r['id'] for r in read(file)})} cases\n\n{table(read(file))}\n")


if __name__ == "__main__":
    main()
