"""Questions from forms and topics: distinct, in their shares, and none of a benchmark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from aspd import main
from aspd_jax.configuration import config_from_dict, read_config
from aspd_jax.errors import ConfigError
from aspd_jax.pipeline.compose import Questions, compose, go_on, is_held_out
from aspd_jax.sources import Conversation
from tests.conftest import GOLDEN, ROOT, shared

BENCHMARKS = GOLDEN / "benchmark_questions.npy"  # fingerprints of the questions of Vicuna Bench and MT-Bench
FILE = ROOT / "configs" / "questions.yaml"
SMALL = {
    "topics": {"a": ["x", "y", "z"], "b": ["1", "2", "3", "4"]},
    "groups": {
        "one": {"share": 1, "forms": ["{a}?", "{n} of {a} and {b}?"]},
        "two": {"share": 3, "forms": ["{b}!", "say {a} to {b}", "{a} {b} {n}"]},
    },
    "numbers": ["five"],
}


def test_questions_are_all_there_is_each_once() -> None:
    of = config_from_dict(Questions, SMALL, "here")
    both = [*compose(of, 1000, 0, False), *compose(of, 1000, 0, True)]
    assert len(both) == len(set(both)) == 3 + 12 + 4 + 12 + 12
    assert ("five of x and 3?", "one") in both and ("say z to 4", "two") in both
    assert all(not is_held_out(text) for text, _ in compose(of, 1000, 0, False))


def test_repeated_forms_and_topics_make_no_question_twice() -> None:
    repeated = {"topics": {"a": ["x", "y", "x"]}, "groups": {"g": {"share": 1, "forms": ["{a}?", "{a}?", "{a} {} {"]}}}
    of = config_from_dict(Questions, repeated, "here")
    both = [text for held_out in (False, True) for text, _ in compose(of, 1000, 0, held_out)]
    assert sorted(both) == ["x {} {", "x?", "y {} {", "y?"]
    with pytest.raises(ConfigError, match="numbers: expected at least one number, got none"):
        config_from_dict(Questions, SMALL | {"numbers": []}, "here")


def test_shares_and_turns() -> None:
    of = config_from_dict(Questions, SMALL, "here")
    groups = Counter(group for _, group in compose(of, 16, 0, False))
    assert groups == {"one": 4, "two": 12}
    forms = Counter("!" in text for text, group in compose(of, 12, 1, False) if group == "two")
    assert forms[True] == 3  # a third of them
    assert compose(of, 12, 0, False) == compose(of, 12, 0, False) != compose(of, 12, 1, False)


def test_follow_ups_take_turns() -> None:
    of = config_from_dict(Questions, SMALL | {"follow_ups": ["Why?", "How?"]}, "here")
    answered = [Conversation(n, str(n), (("user", f"q{n}"), ("assistant", f"a{n}"))) for n in range(9)]
    made = go_on(of, answered, 7, 0)
    assert Counter(one[-1]["content"] for one in made).most_common()[0][1] == 4
    assert len({one[0]["content"] for one in made}) == len(made) == 7
    for one in made:
        assert [message["role"] for message in one] == ["user", "assistant", "user"]
        assert one[1]["content"][1:] == one[0]["content"][1:]
    assert len(go_on(of, answered, 100, 0)) == 9 and go_on(of, answered, 7, 0) == made != go_on(of, answered, 7, 1)
    with pytest.raises(ConfigError, match="follow_ups: expected at least one question, got none"):
        go_on(config_from_dict(Questions, SMALL, "here"), answered, 1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"groups": {"one": {"share": 1, "forms": ["{c}?"]}}},
            r"groups.one: '\{c\}\?': expected topics of a, b, n, got 'c'",
        ),
        (
            {"groups": {"one": {"share": 0, "forms": ["{a}?"]}}},
            "groups.one: expected forms and a share above 0, got 1, 0",
        ),
        ({"topics": {"a": 3}}, "topics.a: expected a list of strings, got 3"),
        ({"topics": ["a"]}, "topics: expected settings by name"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(Questions, SMALL | change, "here")


def test_our_own_are_enough_and_in_no_benchmark() -> None:
    of = read_config(Questions, FILE)
    ours = {text for apart in (False, True) for text, _ in compose(of, 10**6, 0, apart)} | set(of.follow_ups)
    assert len(ours) > 4000
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


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "q.jsonl"
    assert main(["data", "questions", str(FILE), "--count", "40", "--output", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == len({row["prompt"] for row in rows}) == 40 and {"id", "kind", "prompt"} == set(rows[0])
    assert main(["data", "questions", str(FILE), "--count", "99999", "--output", str(file)]) == 0
    assert "only these exist, 99999 were requested" in capsys.readouterr().out


def test_the_command_goes_on_from_answers(tmp_path: Path) -> None:
    answers, file = tmp_path / "a.jsonl", tmp_path / "f.jsonl"
    rows = [
        {"prompt": "q", "text": "a", "finish_reason": "stop"},
        {"prompt": "r", "text": "b", "finish_reason": "length"},
    ]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "questions", str(FILE), "--after", str(answers), "--output", str(file)]) == 0
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert [m["content"] for m in row["messages"][:2]] == ["q", "a"], "an answer that was cut off has no follow-up"
    assert row["messages"][2]["content"] in read_config(Questions, FILE).follow_ups
