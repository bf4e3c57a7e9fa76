"""The whole pipeline: shapes of records, resumption and output."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aspd_jax import LanguageModel, load_model
from aspd_jax.blocks.measures import estimate_tokens, measure, saved
from aspd_jax.blocks.spans import spans_of
from aspd_jax.configuration import read_config
from aspd_jax.layout import Titles
from aspd_jax.pipeline.build import build
from aspd_jax.pipeline.data_config import DataConfig, SelectSection
from aspd_jax.structure import Branch, Parallel, Serial, from_json, plain_text
from aspd_jax.tokens import Codec
from tests.conftest import ROOT
from tests.helpers.pipeline_data import CHAIN, LIST, PROSE, RULES, SMALL, lines
from tests.helpers.tasks import problem
from train.config import DataSection
from train.records import Records


def test_answers_are_kept_and_dependent_ones_stay_serial(source: Path, tmp_path: Path) -> None:
    report = build(RULES, str(source), tmp_path / "out", progress=False)
    structured, plain = lines(tmp_path / "out" / "structured.jsonl"), lines(tmp_path / "out" / "plain.jsonl")
    answers = [LIST, PROSE, CHAIN, "- hi\n- ho", LIST, PROSE]
    found = [from_json(m["structure"]) for row in structured for m in row["messages"] if m["role"] == "assistant"]
    assert [plain_text(structure) for structure in found] == answers
    assert [m["content"] for row in plain for m in row["messages"] if m["role"] == "assistant"] == answers
    assert [bool(spans_of(structure)) for structure in found] == [True, False, False, False, True, False]
    assert [b.title for b in spans_of(found[0])[0].branches] == ["Sleep", "Food", "Sport"]
    leads = [branch.title for item in found[0] if isinstance(item, Parallel) for branch in item.branches]
    assert leads == [f"\n\n{number}. {name}:" for number, name in enumerate(("Sleep", "Food", "Sport"), 1)]
    rejected = lines(tmp_path / "out" / "rejected.jsonl")
    assert {(row["id"], row["stage"]) for row in rejected} == {
        ("chain", "check"), ("short", "short"), ("6", "read"), ("7", "read")
    }  # fmt: skip
    figures = report.as_dict()
    assert figures["records"] == 7 and figures["left_out"]["read"] == 2 and figures["statistics"]["with_block"] == 2
    assert figures["statistics"]["PPD"] == pytest.approx(2 / 6) and figures["statistics"]["ABN"] == 3
    assert "back reference" not in (tmp_path / "out" / "report.md").read_text()


def test_training_reads_what_is_left(source: Path, tmp_path: Path, lm: LanguageModel) -> None:
    build(RULES, str(source), tmp_path / "out", progress=False)
    for name in ("structured", "plain"):
        records = Records(lm, [str(tmp_path / "out" / f"{name}.jsonl")], DataSection(length=4096), tmp_path / "cache")
        assert len(records) == 5 and not records.problems
        forks = [lm.codec.special.parallel_start in example.tokens for example in (records[0], records[1])]
        assert forks == ([True, False] if name == "structured" else [False, False])


@pytest.mark.parametrize("titles", ["names", "leads"])
def test_measures_are_those_of_the_linearisation(lm: LanguageModel, titles: Titles) -> None:
    """Check the measures against tokens counted in the training sequence."""
    codec = Codec(lm.tokenizer, titles=titles)
    structure, special = problem(1, True, "orders", "conclusion").structure, codec.special
    if titles == "leads":
        block = Parallel([Branch(f"\n{n}. {n * 'a'}:", f"\n{n}. {n * 'a'}: {n * 'b c '}") for n in range(1, 13)])
        structure = (Serial("So:"), block, Serial("\nEnd"))

    def count(text: str) -> int:
        return len(codec.text.encode(text))

    answer, found = plain_text(structure), measure(plain_text(structure), spans_of(structure, titles), count)
    sequence = codec.linearise(structure)
    serial, branches, inside = 0, [], False
    for token, fed in zip(sequence.tokens, sequence.fed, strict=True):
        if token == special.branch_start:
            inside = True
            branches.append(0)
        if not fed and inside:
            branches[-1] += 1
        elif not fed:
            serial += 1
        inside = inside and token != special.branch_end
    (block,) = spans_of(structure, titles)
    leads = sum(count(answer[branch.start : branch.start + branch.lead]) for branch in block.branches if branch.lead)
    known = len(branches) + 1 if titles == "leads" else 0  # `<|title|>` before each lead, and `<|para|>`
    assert found.critical_path == serial - known + 1 + max(branches)
    assert found.branch_tokens == leads + sum(branches) - len(branches)
    plain = measure(answer, (), count)
    assert plain.critical_path - found.critical_path == saved(answer, block, count)


def test_the_best_of_several_answers_are_kept(tmp_path: Path) -> None:
    """With `per_question`, a question keeps the answers with the best blocks, then the first ones without a block."""
    file = tmp_path / "in.jsonl"
    plain = "Nothing in particular helps, but sleep does, and so do long walks by the sea with a good friend. " * 3
    rows = [
        {"id": "prose", "question": "How?", "answer": plain},
        {"id": "list", "question": "How?", "answer": LIST},
        {"id": "again", "question": "How?", "answer": plain + "Good luck."},
        {"id": "one", "question": "Why?", "answer": plain},
        {"id": "two", "question": "Why?", "answer": plain + "Yes."},
        {"id": "broken", "question": "Where?", "answer": LIST.replace("\n\n2.", "\n2.")},
        {"id": "whole", "question": "Where?", "answer": plain},
        {"id": "defect", "question": "When?", "answer": LIST.replace("\n\n2.", "\n2.")},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for count, kept in (
        (1, ["list", "one", "whole"]),
        (2, ["prose", "list", "one", "two", "whole"]),
        (0, ["prose", "list", "again", "one", "two", "whole"]),
    ):
        config = DataConfig(select=replace(SMALL, per_question=count))
        report = build(config, str(file), tmp_path / f"{count}", progress=False)
        assert [row["id"] for row in lines(tmp_path / f"{count}" / "structured.jsonl")] == kept
        assert (report.left_out["question"], report.left_out["record"], report.written) == (6 - len(kept), 2, len(kept))
        rejected = [row for row in lines(tmp_path / f"{count}" / "rejected.jsonl") if "message" not in row]
        assert [row["id"] for row in rejected] == [row["id"] for row in rows if row["id"] not in kept]
        assert "unequal gaps" in rejected[-1]["reason"]


def test_every_record_has_one_place_and_the_numbers_add_up(tmp_path: Path) -> None:
    """Check sets, rejected lines and report against one another: answers of several models to the same questions."""
    answers = [
        LIST,
        PROSE,
        CHAIN,
        LIST.replace("\n\n2.", "\n2."),
        "Yes.",
        LIST.replace("\n", "\r\n"),
        "So it is. " * 40,
    ]
    rows: list[Any] = [
        {"id": f"{model}/{question}", "model": f"m{model}", "question": f"{question}?", "answer": answer}
        for question in range(8)
        for model, answer in enumerate(answers[question % 3 :])
    ]
    rows += [{"id": "none", "question": "?"}, {"id": "tools", "question": "q", "answer": "a", "tools": [{}]}]
    rows.append({"id": "cut", "messages": [{"role": role, "content": LIST} for role in ("user", "assistant", "user")]})
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, changes in {
        "default": {},
        "one": {"per_question": 1},
        "few": {"per_question": 2, "serial_ratio": 0.5, "max_repetition": 0.5},
        "kinds": {"serial_kinds": ("stories",)},
    }.items():
        out = tmp_path / name
        report = build(DataConfig(select=replace(SMALL, **changes)), str(file), out, progress=False)
        structured, plain, rejected = (lines(out / f"{kind}.jsonl") for kind in ("structured", "plain", "rejected"))
        whole = [row for row in rejected if "message" not in row]
        assert [row["line"] for row in structured] == [row["line"] for row in plain]
        assert sorted(row["line"] for row in (*structured, *whole)) == list(range(1, len(rows) + 1))
        assert all(row["reason"] for row in rejected)
        assert report.records == len(rows) and report.written == len(structured)
        assert report.left_out == Counter(row["stage"] for row in whole)
        assert report.failed == Counter(row["stage"] for row in rejected if "message" in row and row["stage"] != "read")
        found = json.loads((out / "report.json").read_text())
        assert found["records"] == found["written"] + sum(found["left_out"].values())
        assert found["statistics"]["answers"] == len(structured)
        text = (out / "report.md").read_text()
        counts = {what: int(n) for what, n in re.findall(r"\| (records [^|]+) \| (\d+) \|", text)}
        read, *others = counts.values()
        assert read == len(rows) == sum(others) and counts["records in both sets"] == len(structured)
        if name == "default":
            assert not report.left_out["question"] and report.left_out["record"] == 8  # the lists with unequal gaps
        else:
            assert report.written < len(rows) / 2


def test_prose_is_kept_for_some_kinds_of_questions_only(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    rows = [
        {"id": f"{kind} {name}", "kind": kind, "question": f"{kind} {name}?", "answer": text}
        for kind in ("list", "story")
        for name, text in (("a", LIST), ("b", PROSE), ("chain", CHAIN))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kinds, expected in (
        ((), {"list a", "list b", "list chain", "story a", "story b", "story chain"}),
        (("story",), {"list a", "list chain", "story a", "story b", "story chain"}),
    ):
        config = DataConfig(select=replace(SMALL, serial_kinds=kinds))
        out = tmp_path / f"out{len(kinds)}"
        build(config, str(file), out, progress=False)
        assert {row["id"] for row in lines(out / "structured.jsonl")} == expected


def test_estimated_tokens_are_near_real_ones(lm: LanguageModel) -> None:
    assert estimate_tokens("") == 0 and estimate_tokens("你好") == 2
    assert 0.7 < estimate_tokens(LIST) / (len(LIST.split()) * 1.3) < 1.3


def test_only_the_last_message_says_what_an_answer_should_be(tmp_path: Path) -> None:
    """Check a list after a question about a number and after a request for four parts, each of an earlier turn."""
    source, kept = tmp_path / "in.jsonl", []
    for earlier, request in (
        ("How many is it?", "What helps?"),
        ("Name four.", "What helps?"),
        ("?", "How many is it?"),
    ):
        turns = [("user", earlier), ("assistant", "Yes."), ("user", request), ("assistant", LIST)]
        source.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
        config = DataConfig(select=replace(SMALL, as_asked=True))
        out = tmp_path / f"{len(kept)}"
        kept.append(build(config, str(source), out, progress=False).statistics()["with_block"])
    assert kept == [1, 1, 0]


def test_blocks_may_have_too_many_branches(two: Path, tmp_path: Path) -> None:
    config = DataConfig(select=SelectSection(min_tokens=20, max_branches=2))
    report = build(config, str(two), tmp_path / "out", progress=False)
    assert report.failed["select"] == 1


def test_a_tokenizer_counts_its_own_tokens(two: Path, tmp_path: Path) -> None:
    lm = load_model("demo")
    config = DataConfig(select=SelectSection(min_tokens=20, tokenizer="demo"))
    report = build(config, str(two), tmp_path / "out", progress=False)
    (block,) = spans_of(from_json(lines(tmp_path / "out" / "structured.jsonl")[0]["messages"][1]["structure"]))
    pieces = [LIST[: block.start], *(LIST[b.start : b.end] for b in block.branches), LIST[block.end :]]
    assert report.answers[0].tokens == sum(len(lm.codec.text.encode(piece)) for piece in pieces)


def test_the_shipped_configuration_is_the_default() -> None:
    assert read_config(DataConfig, ROOT / "configs" / "data.yaml") == DataConfig()


def test_records_that_teach_nothing_good_are_in_neither_set(tmp_path: Path) -> None:
    """Check repetitive and truncated answers, unrequested parts, and surplus serial answers."""
    circles = "It is good. It is good for you and me. " * 12
    rows = [
        {"id": "list", "question": "Give me three ideas.", "answer": LIST},
        {"id": "miscounted", "question": "Give me four ideas.", "answer": LIST},
        {"id": "circles", "question": "?", "answer": circles},
        {"id": "cut", "prompt": "?", "text": LIST, "finish_reason": "length"},
        *(
            {
                "id": f"prose {n}",
                "question": f"{n}?",
                "answer": f"Number {n} is what it is, and nobody in the village could ever tell why.",
            }
            for n in range(60)
        ),
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def kept(name: str, **changes: Any) -> tuple[set[str], Any]:
        config = DataConfig(select=replace(SMALL, **changes))
        report = build(config, str(source), tmp_path / name, progress=False)
        structured, plain = (lines(tmp_path / name / f"{kind}.jsonl") for kind in ("structured", "plain"))
        assert [row["id"] for row in structured] == [row["id"] for row in plain]
        return {row["id"] for row in structured}, report

    prose = {f"prose {n}" for n in range(60)}
    assert kept("all")[0] == {"list", "miscounted", "circles"} | prose
    assert kept("repeats", max_repetition=0.3)[0] == {"list", "miscounted"} | prose
    assert kept("asked", as_asked=True)[0] == {"list", "circles"} | prose
    some, report = kept("ratio", max_repetition=0.3, serial_ratio=5.0)
    assert {"list", "miscounted"} <= some and 3 <= len(some & prose) <= 20  # ten on average
    assert report.left_out["serial"] == 60 - len(some & prose) and report.left_out["record"] == 1
    assert kept("again", max_repetition=0.3, serial_ratio=5.0)[0] == some
    rejected = {row["id"]: row["reason"] for row in lines(tmp_path / "ratio" / "rejected.jsonl")}
    assert (
        "of its words repeat" in rejected["circles"] and "finish_reason: expected a complete answer" in rejected["cut"]
    )
    assert "asks for 4, and its blocks have 3" in lines(tmp_path / "asked" / "rejected.jsonl")[0]["reason"]


def test_lists_with_a_defect_take_no_place_of_serial_answers(tmp_path: Path) -> None:
    unequal = LIST.replace("\n\n2.", "\n2.")
    prose = "Nobody in the village could ever tell why it is what it is, and nobody ever asked."
    answers = [*[LIST] * 10, *[unequal] * 40, *[prose] * 10]
    source = tmp_path / "in.jsonl"
    rows = ({"id": number, "question": f"{number}?", "answer": answer} for number, answer in enumerate(answers))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(select=replace(SMALL, serial_ratio=1.0))
    report = build(config, str(source), tmp_path / "out", progress=False)
    assert len(lines(tmp_path / "out" / "plain.jsonl")) == 20 and (
        report.left_out["record"],
        report.left_out["serial"],
    ) == (40, 0)
    two = {"id": 1, "question": "?", "answer": f"{LIST}\n\nThe others are these.\n\n{unequal}"}
    source.write_text(json.dumps(two) + "\n")
    build(config, str(source), tmp_path / "two", progress=False)
    (row,) = lines(tmp_path / "two" / "structured.jsonl")
    assert [part["type"] for part in row["messages"][1]["structure"]] == ["serial", "parallel", "serial"]
    assert unequal in row["messages"][1]["structure"][2]["text"], "the list with a defect is serial text"
