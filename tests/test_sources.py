"""Records in the shapes that people keep them in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aspd_jax.errors import DataError
from aspd_jax.pipeline.sources import Conversation, Unreadable, conversation, read_records

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


@pytest.mark.parametrize(
    "row, reason",
    [
        (1, "object"),
        ({}, "no question and answer"),
        ({"question": "q"}, "no question and answer"),
        ({"question": "q", "answer": " "}, "no answer"),
        ({"messages": [{"role": "alien", "content": ""}]}, 'role "alien"'),
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


def test_files_of_other_kinds(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.csv").write_text("question,answer\nq,a\nr,b\n")
    for name in ("x.json", "x.csv"):
        assert [r.messages for r in read_records(str(tmp_path / name)) if isinstance(r, Conversation)] == [
            (("user", "q"), ("assistant", "a")), (("user", "r"), ("assistant", "b"))
        ]  # fmt: skip
    for name in ("none.jsonl", "x.txt"):
        (tmp_path / "x.txt").write_text("")
        with pytest.raises(DataError, match=name):
            list(read_records(str(tmp_path / name)))
