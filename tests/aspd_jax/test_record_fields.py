"""Records of published formats, one each: every field is in the conversation, has no effect, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from aspd_jax.record_fields import LEARNED, NOT_LEARNED
from aspd_jax.sources import Conversation, Unreadable, conversation

Q, A = {"role": "user", "content": "q?"}, {"role": "assistant", "content": "an answer"}
HUMAN, GPT = {"from": "human", "value": "q?"}, {"from": "gpt", "value": "an answer"}
PAIR = (("user", "q?"), ("assistant", "an answer"))
SYSTEM = (("system", "Be brief."), *PAIR)
SAME, OTHER = ([{"type": "serial", "text": text}] for text in ("an answer", "another"))
TOOLS = [{"name": "f", "parameters": {}}]

PUBLISHED: dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...]]] = {
    "Alpaca": ({"instruction": "q?", "input": "", "output": "an answer"}, PAIR),
    "Alpaca with input and rendered text": (
        {"instruction": "q?", "input": "i", "output": "an answer",
         "text": "Below is an instruction.\n### Instruction:\nq?\n\ni\n### Response:\nan answer"},
        (("user", "q?\n\ni"), PAIR[1]),
    ),
    "ShareGPT": ({"id": "x_0", "conversations": [HUMAN, GPT]}, PAIR),
    "ShareGPT with system": ({"conversations": [HUMAN, GPT], "system": "Be brief."}, SYSTEM),
    "ShareGPT of NeMo": (
        {"system": "", "conversations": [HUMAN | {"label": None}, GPT | {"label": None}], "type": "TEXT_TO_VALUE"}, PAIR
    ),
    "OpenAI messages": (
        {"messages": [{"role": "system", "content": "Be brief."}, Q, A | {"weight": 1, "refusal": None}]}, SYSTEM
    ),
    "OpenOrca": ({"id": "t0.1", "system_prompt": "Be brief.", "question": "q?", "response": "an answer"}, SYSTEM),
    "Dolly": (
        {"instruction": "q?", "context": "c", "response": "an answer", "category": "closed_qa"},
        (("user", "q?\n\nc"), PAIR[1]),
    ),
    "context_qa.load_v2 of Axolotl": (
        {"context": "c", "question": "q?", "answer": "an answer"}, (("user", "Context: c\nQuestion: q?"), PAIR[1])
    ),
    "context_qa of Axolotl": (
        {"article": "c", "question": "q?", "answer": "an answer"}, (("user", "c\n===\nq?"), PAIR[1])
    ),
    "BoolQ": ({"passage": "c", "question": "q?", "answer": "an answer"}, (("user", "c\nQuestion: q?"), PAIR[1])),
    "multiple choice": (
        {"question": "q?", "choices": ["red", "blue"], "answer": "A"},
        (("user", "q?\n\nA. red\nB. blue"), ("assistant", "A")),
    ),
    "UltraFeedback, binarised": (
        {"prompt": "q?", "prompt_id": "f", "chosen": [Q, A], "rejected": [Q, A], "messages": [Q, A],
         "score_chosen": 8.5, "score_rejected": 3.0},
        PAIR,
    ),
    "UltraFeedback without messages": (
        {"source": "x", "prompt": "q?", "chosen": [Q, A], "chosen_model": "m", "rejected": [Q, A]},
        PAIR,
    ),
    "DPO": ({"prompt": "q?", "chosen": "an answer", "rejected": "no"}, PAIR),
    "DPO with system": ({"system": "Be brief.", "question": "q?", "chosen": "an answer", "rejected": "no"}, SYSTEM),
    "TRL, conversational preference": ({"prompt": [Q], "chosen": [A], "rejected": [A]}, PAIR),
    "a question in both lists": (
        {"prompt": [{"role": "system", "content": "Be brief."}, Q], "chosen": [Q, A], "rejected": [Q, A]}, SYSTEM
    ),
    "a text beside its structure": ({"messages": [Q, A | {"structure": SAME, "finish_reason": "stop"}]}, PAIR),
    "TRL, conversational completion": ({"prompt": [Q], "completion": [A]}, PAIR),
    "KTO": ({"prompt": "q?", "completion": "an answer", "label": True}, PAIR),
    "KTO of LLaMA-Factory": ({"messages": [Q, A], "kto_tag": True}, PAIR),
    "LIMA": ({"conversations": ["q?", "an answer"], "source": "stackexchange"}, PAIR),
    "no_robots": ({"prompt": "q?", "prompt_id": "f", "messages": [Q, A], "category": "Open QA"}, PAIR),
    "tulu 3": ({"id": "a", "messages": [Q, A], "source": "ai2/x"}, PAIR),
    "FLAN": ({"inputs": "q?", "targets": "an answer", "task_name": "y", "template_type": "z"}, PAIR),
    "MATH-500": (
        {"problem": "q?", "solution": "So it is \\boxed{7}.", "answer": "7", "level": 2, "unique_id": "t"},
        (PAIR[0], ("assistant", "So it is \\boxed{7}.")),
    ),
    "verl": (
        {"data_source": "gsm8k", "prompt": [Q], "output": "an answer", "ability": "math",
         "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 1}, "index": 1},
        PAIR,
    ),
    "oasst, exported as conversations": (
        {"conversation": [{"role": "prompter", "content": "q?"}, A], "message_tree_id": "t", "lang": "en",
         "review_count": 3, "rank": 0, "deleted": False},
        PAIR,
    ),
    "Hermes, tools in the system message": (
        {"conversations": [{"from": "system", "value": 'Tools: [{"name": "f"}]'}, HUMAN, GPT],
         "tools": '[{"name": "f"}]', "category": "x", "subcategory": "y", "task": "z"},
        (("system", 'Tools: [{"name": "f"}]'), *PAIR),
    ),
    "this project": (
        {"id": 1, "messages": [Q, A], "text": "an answer", "structure": [{"type": "serial", "text": "an answer"}],
         "finish_reason": "stop", "stats": {"steps": 3}, "sample": 0, "kind": "lists", "line": 1, "pipeline": []},
        PAIR,
    ),
    "a table of pandas": ({"Unnamed: 0": 4, "__index_level_0__": 4, "": 1, "question": "q?", "answer": "an answer",
                           "context": float("nan"), "tools": "[]", "images": []}, PAIR),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formats(name: str) -> None:
    row, messages = PUBLISHED[name]
    found = conversation(row, 1)
    assert isinstance(found, Conversation), found
    assert found.messages == messages


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "xLAM": ({"id": 1, "query": "q?", "answers": '[{"name": "f"}]', "tools": "[{}]"}, "no question and answer"),
    "tools beside messages": ({"messages": [Q, A], "tools": TOOLS}, '"tools": expected no content beside'),
    "tool calls": ({"messages": [Q, A | {"tool_calls": [{"id": "1"}]}]}, "messages[1].tool_calls: expected none"),
    "functions": ({"messages": [Q, A], "functions": TOOLS}, '"functions"'),
    "images": ({"messages": [Q, A], "images": ["a.png"]}, '"images"'),
    "SQuAD": (
        {"id": "1", "title": "T", "context": "c", "question": "q?", "answers": {"text": ["a"], "answer_start": [0]}},
        "no question and answer",
    ),
    "documents": ({"question": "q?", "answer": "a", "documents": ["c"]}, '"documents"'),
    "several contexts": ({"question": "q?", "answer": "a", "context": ["c", "d"]}, '"context"'),
    "context beside messages": ({"messages": [Q, A], "context": "c"}, '"context"'),
    "choices with labels": ({"question": "q?", "answer": "a", "choices": {"text": ["c"], "label": ["A"]}}, '"choices"'),
    "another system message": (
        {"system": "s", "messages": [{"role": "system", "content": "t"}, Q, A]}, '"system": expected no content'
    ),
    "two system prompts": ({"system": "s", "system_prompt": "t", "question": "q?", "answer": "a"}, '"system_prompt"'),
    "two questions": ({"question": "q?", "prompt": "r?", "answer": "a"}, '"prompt"'),
    "two answers": ({"question": "q?", "answer": "a", "output": "b"}, '"output"'),
    "a thought": ({"question": "q?", "answer": "a", "reasoning": "so"}, '"reasoning"'),
    "history beside messages": ({"messages": [Q, A], "history": [["r", "b"]]}, '"history"'),
    "an unknown field": ({"question": "q?", "answer": "a", "hint": "h"}, '"hint": expected no content beside'),
    "an unknown field of a message": ({"messages": [Q, A | {"train_detail": [{}]}]}, "messages[1].train_detail"),
    "thinking of a message": ({"messages": [Q, A | {"thinking": "so"}]}, "messages[1].thinking: expected none"),
    "oasst, one message a row": ({"message_id": "1", "role": "prompter", "text": "q?"}, "no question and answer"),
    "HH-RLHF": ({"chosen": "\n\nHuman: q?\n\nAssistant: a", "rejected": "x"}, "no question and answer"),
    "another structure": ({"messages": [Q, A], "structure": OTHER}, '"structure": expected the text'),
    "another structure of a message": ({"messages": [Q, A | {"structure": OTHER}]}, "messages[1].structure: expected"),
    "two structures": (
        {"messages": [Q, {"role": "assistant", "structure": OTHER}], "structure": SAME}, '"structure": expected'
    ),
    "a truncated answer": ({"messages": [Q, A], "finish_reason": "length"}, "finish_reason: expected"),
    "a truncated message": ({"messages": [Q, A | {"finish_reason": "length"}]}, "messages[1].finish_reason: expected"),
    "an image of a message": ({"messages": [Q | {"input_images_url": "x"}, A]}, "messages[0].input_images_url"),
    "KTO, undesirable": ({"prompt": "q?", "completion": "a", "label": False}, '"label": expected 1 or true, got false'),
    "a mask of messages": ({"messages": [Q, A, Q, A], "loss_mask": [0, 0, 0, 1]}, '"loss_mask"'),
}  # fmt: skip


@pytest.mark.parametrize("key", ["image_id", "images_url", "video_id", "audio_url", "input_image_hash", "photo_count"])
def test_names_of_other_media_are_refused(key: str) -> None:
    found = conversation({"messages": [Q, A], key: "x"}, 1)
    assert isinstance(found, Unreadable) and f'"{key}": expected no content' in found.reason
    found = conversation({"messages": [Q, A], "imagery_id": "x", "photographer_id": "x", key: None}, 1)
    assert isinstance(found, Conversation), "negative control"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str) -> None:
    row, reason = REFUSED[name]
    found = conversation(row, 7)
    assert isinstance(found, Unreadable) and found.number == 7 and reason in found.reason, found


@pytest.mark.parametrize("key", [*LEARNED, *NOT_LEARNED])
def test_an_answer_without_loss_is_refused_by_name(key: str) -> None:
    """Flags of answers and of records are read; those of other messages, which are never learned, have no effect."""
    off, on = ((False, 0, 0.0, "False", "0"), (True, 1, 1.0, "true", [1, 1], None, ""))
    for value in off if key in LEARNED else on[:-2]:
        inside, beside = {"messages": [Q, A | {key: value}, Q, A]}, {"messages": [Q, A], key: value}
        for row, where in ((inside, f"messages[1].{key}: expected"), (beside, f'"{key}": expected')):
            found = conversation(row, 1)
            assert isinstance(found, Unreadable) and found.reason.startswith(where), (value, found)
        assert isinstance(conversation({"messages": [Q | {key: value}, A]}, 1), Conversation)
    for value in on if key in LEARNED else (*off, None, ""):
        assert isinstance(conversation({"messages": [Q, A | {key: value}], key: value}, 1), Conversation), value
    if key in LEARNED:
        assert isinstance(conversation({"messages": [Q, A | {key: 0.5}]}, 1), Unreadable)
