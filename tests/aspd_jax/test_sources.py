"""Records in common shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from aspd_jax.errors import DataError
from aspd_jax.sources import Conversation, Unreadable, conversation, read_records

SHAPES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "chat parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]},
                                {"role": "assistant", "content": "a"}]},
    "structured": {"messages": [{"role": "user", "content": "q"}], "structure": [{"type": "serial", "text": "a"}]},
    "generated": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "text": "a",
                  "structure": [{"type": "serial", "text": "a"}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "Alpaca": {"instruction": "q", "input": "", "output": "a"},
    "pair": {"question": "q", "answer": "a"},
    "prompt": {"prompt": "q", "response": "a"},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_records(name: str) -> None:
    assert conversation(SHAPES[name], 3) == Conversation(3, "3", (("user", "q"), ("assistant", "a")))


def test_history_and_input_come_first() -> None:
    row = {"id": 9, "instruction": "q", "input": "i", "output": "a", "history": [["q0", "a0"]], "system": "s"}
    assert conversation(row, 1) == Conversation(
        1, "9", (("system", "s"), ("user", "q0"), ("assistant", "a0"), ("user", "q\n\ni"), ("assistant", "a"))
    )


def test_text_beside_messages_and_instructions_is_kept() -> None:
    row: dict[str, Any] = {"system": "s", **SHAPES["ShareGPT"]}
    assert conversation(row, 1) == Conversation(1, "1", (("system", "s"), ("user", "q"), ("assistant", "a")))
    row["conversations"] = [{"from": "system", "value": "s"}, *row["conversations"]]
    assert conversation(row, 1) == Conversation(1, "1", (("system", "s"), ("user", "q"), ("assistant", "a")))
    row = {"instruction": "q", "context": "c", "response": "a", "category": "closed_qa"}
    assert conversation(row, 1) == Conversation(1, "1", (("user", "q\n\nc"), ("assistant", "a")))
    assert conversation(row | {"context": " "}, 1) == Conversation(1, "1", (("user", "q"), ("assistant", "a")))


@pytest.mark.parametrize(
    "row, reason",
    [
        (1, "object"),
        ({}, "no question and answer"),
        ({"question": "q"}, "no question and answer"),
        ({"question": "q", "answer": " "}, "expected an answer"),
        ({"messages": [{"role": "alien", "content": ""}]}, 'got "alien"'),
        (
            {"messages": [{"role": "user"}]},
            r"messages\[0\].content: expected a string or a list of text parts, got null",
        ),
        ({"question": "q", "answer": "\ud800"}, "surrogate"),
        ({"history": [1], "question": "q", "answer": "a"}, r"history\[0\]"),
    ],
)
def test_what_is_no_conversation_is_named(row: Any, reason: str) -> None:
    found = conversation(row, 4)
    assert isinstance(found, Unreadable) and found.number == 4 and re.search(reason, found.reason)


def test_messages_that_say_more_than_text_are_refused_by_name() -> None:
    def read(**fields: Any) -> str:
        row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"} | fields]}
        found = conversation(row, 1)
        return found.reason if isinstance(found, Unreadable) else ""

    assert read(tool_calls=[], reasoning_content=None, structure=None, weight=1, name="x") == ""
    assert read(tool_calls=[{"id": "1"}]) == 'messages[1].tool_calls: expected none, got [{"id": "1"}]'
    assert read(reasoning_content="so") == 'messages[1].reasoning_content: expected none, got "so"'
    assert read(weight=0).startswith("messages[1].weight: expected 1 or true, got 0; every answer is learned")
    for content, place in (
        ([{"type": "text", "text": None}], "content[0].text"),
        ([{"type": "text"}], "content[0].text"),
        ([{"type": "text", "text": 1}], "content[0].text"),
        ([{"text": "a"}], "content[0]"),
        ([[{"type": "text", "text": "a"}]], "content[0]"),
        ([{"type": "image_url", "image_url": "x"}], "content[0]"),
        (["a"], "content[0]"),
        ([], "content"),
        (None, "content"),
        ({"text": "a"}, "content"),
    ):
        assert read(content=content).startswith(f"messages[1].{place}: expected ")


def test_messages_behind_the_last_answer_are_dropped() -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    found = conversation({"messages": said}, 1)
    assert isinstance(found, Conversation) and found.messages == (("user", "q"), ("assistant", "a"))
    assert found.unanswered == 1
    greeting = conversation({"messages": [said[1], said[0]]}, 1)
    assert isinstance(greeting, Unreadable) and greeting.reason == "expected a question before the answer, got none"


def test_a_rendered_record_is_no_answer() -> None:
    """Check columns of Alpaca and of chats whose `text` is the whole record; negative control: `text` alone answers."""
    prompt = "Below is an instruction.\n\n### Instruction:\nName a bird.\n\n### Response:\n"
    row = {"instruction": "Name a bird.", "input": "", "text": prompt}
    empty = conversation(row | {"output": ""}, 1)
    assert isinstance(empty, Unreadable) and "answer" in empty.reason
    full = conversation(row | {"output": "A wren.", "text": prompt + "A wren."}, 1)
    assert isinstance(full, Conversation) and full.messages[-1] == ("assistant", "A wren.")
    said = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
    ]
    chat = conversation({"messages": said, "text": "<u>q1<a>a1<u>q2"}, 1)
    assert isinstance(chat, Conversation) and chat.messages == (("user", "q1"), ("assistant", "a1"))
    alone = conversation({"prompt": "q", "text": "An answer."}, 1)
    assert isinstance(alone, Conversation) and alone.messages == (("user", "q"), ("assistant", "An answer."))


def test_one_bad_record_ends_no_file_of_another_kind(tmp_path: Path) -> None:
    good = {"question": "q", "answer": "a"}
    rows = [good, {"question": "\ud83d", "answer": "a"}, float("nan"), 3, {"messages": "x"}, good]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text(json.dumps(good) + "\n{\n" + json.dumps(good) + "\n")
    table = pyarrow.table({"question": ["q", None, "q"], "answer": ["a", "a", "a"], "messages": [None, None, []]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    for name, bad, count in (("x.json", [2, 3, 4, 5], 6), ("lines.json", [2], 3)):
        found = list(read_records(str(tmp_path / name)))
        assert len(found) == count and [r.number for r in found if isinstance(r, Unreadable)] == bad
    found = list(read_records(str(tmp_path / "x.parquet")))
    assert [type(record) for record in found] == [Conversation, Unreadable, Unreadable]


def test_files_of_other_kinds(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    assert [r.messages for r in read_records(str(tmp_path / "x.json")) if isinstance(r, Conversation)] == [
        (("user", "q"), ("assistant", "a")), (("user", "r"), ("assistant", "b"))
    ]  # fmt: skip
    for name in ("none.jsonl", "x.txt", "x.csv"):
        (tmp_path / name).with_suffix(".txt").write_text("")
        with pytest.raises(DataError, match=name):
            list(read_records(str(tmp_path / name)))


GOOD = json.dumps({"question": 'q, [x] {y} "z" \\', "answer": "a\n1"}).encode()
ARRAYS = {
    "one is no JSON": (b'[%s, {"question": NaN}, %s]' % (GOOD, GOOD), [True, False, True]),
    "one is not UTF-8": (b'[%s, {"question": "\xe9", "answer": "x"}, %s]' % (GOOD, GOOD), [True, False, True]),
    "one is nested too deep": (b"[%s, %s, %s]" % (GOOD, b"[" * 99999 + b"]" * 99999, GOOD), [True, False, True]),
    "a comma too many": (b"[%s,]" % GOOD, [True, False]),
    "it is cut off": (b'[%s, {"question": "x"' % GOOD, [True, False]),
    "something follows": (b"[%s] x" % GOOD, [True, False]),
    "scalars": (b'[1, "x", null]', [False] * 3),
    "nothing": (b" [ ] ", []),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_fault_in_an_array_leaves_the_other_elements(name: str, tmp_path: Path) -> None:
    data, readable = ARRAYS[name]
    (tmp_path / "records.json").write_bytes(data)
    records = list(read_records(str(tmp_path / "records.json")))
    assert [isinstance(record, Conversation) for record in records] == readable
    assert [record.number for record in records] == list(range(1, 1 + len(readable)))
