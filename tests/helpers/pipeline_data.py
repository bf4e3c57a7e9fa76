"""Records for tests of the pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aspd_jax.pipeline.data_config import DataConfig, SelectSection

LIST = (
    "Here are ideas:\n\n"
    "1. Sleep: eight hours every night, in a dark and quiet room, help you more than any coffee can.\n\n"
    "2. Food: eat fruit and fish, drink water, and leave sugar to the birthdays of your friends.\n\n"
    "3. Sport: run, swim or dance for half an hour each day, wherever you happen to live.\n\nGood luck!"
)

PROSE = "The moon is far away. " * 12

CHAIN = (
    "1. Cost of pens: three pens at twenty dollars make 3 x 20 = 60 dollars in the shop today.\n"
    "2. Tax on top: ten percent of 60 is 6, which makes it 66 dollars all in all for you.\n"
)

SMALL = SelectSection(min_tokens=20)

RULES = DataConfig(select=SMALL)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def write_source(folder: Path) -> Path:
    """Records of all shapes, and two that cannot be read."""
    file = folder / "records.jsonl"
    rows = [
        {"id": "list", "question": "How to live?", "answer": LIST},
        {"id": "prose", "question": "Tell me.", "answer": PROSE},
        {"id": "chain", "question": "What does it cost?", "answer": CHAIN},
        {"id": "short", "question": "Say hi.", "answer": "- hi\n- ho"},
        {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": LIST},
                      {"role": "user", "content": "B?"}, {"role": "assistant", "content": PROSE}]},
        {"no": "answer"},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return file


def write_two(folder: Path) -> Path:
    """A record with independent items, and one with dependent ones."""
    file = folder / "in.jsonl"
    rows = [{"id": "<a>", "question": "How & why?", "answer": LIST}, {"id": "b", "question": "?", "answer": CHAIN}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
