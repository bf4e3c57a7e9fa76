"""The questions of `configs/questions.jsonl`: distinct, and none of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from infer.offline.batch import read_prompts
from tests.conftest import GOLDEN, ROOT, shared

BENCHMARKS = GOLDEN / "benchmark_questions.npy"  # fingerprints of the questions of Vicuna Bench and MT-Bench
FILE = ROOT / "configs" / "questions.jsonl"


def test_our_own_are_different_and_in_no_benchmark() -> None:
    items = read_prompts(FILE, chat=False)
    ours = {str(item.prompt) for item in items}
    assert len(items) == len(ours) == 3600 and all(item.source["kind"] for item in items)
    theirs = set(np.load(BENCHMARKS).tolist())
    assert len(theirs) > 2000 and not _fingerprints(ours) & theirs
    # Negative control: a question is found again in other case, and with other words around it.
    question = _fingerprints(["a b c d e f g h?"])
    assert _fingerprints(["A b c d, e f g h"]) & question and _fingerprints(["x a b c d e f g h? y"]) & question
    assert not _fingerprints(["a b c d e f g x"]) & question


def test_fingerprints_are_those_of_the_benchmarks() -> None:
    """BENCHMARKS is `np.save(BENCHMARKS, fingerprints)`, as computed here."""
    files = [shared("data", name, "question.jsonl") for name in ("vicuna_bench", "mt_bench")]
    turns = [turn for file in files for line in file.read_text().splitlines() for turn in json.loads(line)["turns"]]
    fingerprints = np.sort(np.array([*_fingerprints(turns)], np.uint64))
    np.testing.assert_array_equal(np.load(BENCHMARKS), fingerprints)


def _fingerprints(texts: Iterable[str]) -> set[int]:
    """Return hashes of 64 bits: of each text by its letters and digits, and of every eight words in a row."""
    keys = set()
    for text in texts:
        words = text.casefold().split()
        keys.add("".join(char for char in text.casefold() if char.isalnum()))
        keys |= {" ".join(words[at : at + 8]) for at in range(len(words) - 7)}
    return {int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") for key in keys}
