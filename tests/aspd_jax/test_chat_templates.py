"""Chat templates: the context of a training answer equals the prompt of the engine and of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from aspd_jax import LanguageModel
from aspd_jax.configuration import find_config, read_config
from aspd_jax.errors import ConversationError, RequestError
from aspd_jax.sources import Conversation, conversation
from infer import Engine
from tests.conftest import ROOT, shared
from tests.train.test_records import STRUCTURE, write
from train.config import DataSection, TrainConfig
from train.records import Records, encode_conversation

ANSWER = "{% set c = m.content %}"
AFTER_THOUGHT = "{% set c = m.content.split('</think>')[-1].lstrip('\\n') %}"


def turns(answer: str, prompt: str, head: str = "") -> str:
    """A template whose assistant messages are `answer` and whose generation prompt is `prompt`; `m` is the message."""
    return (
        f"{head}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{{{ eos_token }}}}\n"
        "{% else %}[{{ m.role }}]\n{{ m.content | trim }}\n{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


ALTERNATE = (
    "{% set said = messages[1:] if messages[0].role == 'system' else messages %}{% for m in said %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {
    "plain": turns(ANSWER + "[assistant]\n{{ c }}", "[assistant]\n"),
    "trims": turns("[assistant]\n{{ m.content | trim }}", "[assistant]\n"),
    "dated": turns(ANSWER + "[assistant]\n{{ c }}", "[assistant]\n", "Today is {{ strftime_now('%d %b %Y') }}.\n"),
    "alternates": turns(ANSWER + "[assistant]\n{{ c }}", "[assistant]\n", ALTERNATE),
    # Qwen3: an empty thought before the last answer, thoughts dropped from earlier ones, none in the prompt.
    "thought before the last": turns(
        AFTER_THOUGHT + "[assistant]\n{{ '<think>\n\n</think>\n\n' if loop.last }}{{ c }}", "[assistant]\n"
    ),
    # Qwen3 without thoughts: every answer has an empty one, the prompt has none.
    "thought before all": turns(AFTER_THOUGHT + "[assistant]\n<think>\n\n</think>\n\n{{ c }}", "[assistant]\n"),
    # Qwen3.5: the prompt opens a thought, earlier answers have none.
    "opens a thought": turns(
        AFTER_THOUGHT + "[assistant]\n{{ '<think>\n\n</think>\n\n' if loop.last }}{{ c }}", "[assistant]\n<think>\n"
    ),
    # DeepSeek-R1-Distill: the same, and white space behind a thought stays.
    "opens a thought, keeps space": turns(
        "{% set c = m.content.split('</think>')[-1] %}<A>{{ c }}", "<A><think>\n"
    ),
}  # fmt: skip
PLAIN = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.\n"},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "Much more."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome."},
    ]
}
THOUGHTS = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nIt is one.\n</think>\n\nYes, one."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>\nIt is two.\n</think>\n\nYes, two."},
    ]
}


def with_template(lm: LanguageModel, template: str) -> LanguageModel:
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.chat_template = template
    return replace(lm, tokenizer=tokenizer)


def record_of(row: Any) -> Conversation:
    found = conversation(row, 1)
    assert isinstance(found, Conversation)
    return found


def learned(lm: LanguageModel, row: Any) -> tuple[list[tuple[list[int], str]], dict[int, str]]:
    """Of each answer with loss, the tokens before it and its text with its end; and what was left out."""
    examples, skipped = encode_conversation(lm, record_of(row), structured=False)
    found = []
    for item in examples:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], item.loss, [False]]).astype(int)))
        for start, stop in edges.reshape(-1, 2):
            found.append((item.tokens[:start].tolist(), lm.tokenizer.decode(item.tokens[start:stop])))
    return found, skipped


@pytest.mark.parametrize("row", [PLAIN, THOUGHTS], ids=["plain", "thoughts"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_learned_behind_the_prompt_that_asks_for_it(lm: LanguageModel, name: str, row: Any) -> None:
    own = with_template(lm, TEMPLATES[name])
    engine = Engine(own, max_length=256, max_batch=1)
    messages = row["messages"]
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    found, skipped = learned(own, row)
    assert not skipped and len(found) == len(places)
    for place, (before, answer) in zip(places, found, strict=True):
        assert before == engine.encode(messages[:place])
        prompt = own.tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
        text = own.tokenizer.decode(before)
        assert text == prompt
        said = messages[place]["content"]
        opened = "<think>\n" if prompt.endswith("<think>\n") else ""
        assert answer == said.removeprefix(opened) + own.tokenizer.eos_token


def test_turns_share_an_example_where_prompts_continue(lm: LanguageModel) -> None:
    counts = {}
    for name, template in TEMPLATES.items():
        own = with_template(lm, template)
        counts[name] = [len(encode_conversation(own, record_of(row), False)[0]) for row in (PLAIN, THOUGHTS)]
    assert counts == {
        "plain": [1, 1], "trims": [2, 1], "dated": [1, 1], "alternates": [1, 1], "thought before the last": [1, 2],
        "thought before all": [3, 2], "opens a thought": [3, 2], "opens a thought, keeps space": [3, 2],
    }  # fmt: skip


def test_the_whole_conversation_is_another_prompt(lm: LanguageModel) -> None:
    """Negative control: the template's rendering of all turns has a thought before the last answer."""
    own = with_template(lm, TEMPLATES["thought before the last"])
    whole = own.tokenizer.apply_chat_template(PLAIN["messages"], tokenize=False)
    before, _ = learned(own, PLAIN)[0][-1]
    assert not whole.startswith(own.tokenizer.decode(before) + "Welcome.")
    assert whole.startswith(own.tokenizer.decode(before) + "<think>")


def test_structure_survives_where_a_thought_is_dropped(lm: LanguageModel) -> None:
    own = with_template(lm, TEMPLATES["opens a thought"])
    thought: list[Any] = [{"type": "serial", "text": "<think>\nLet me see.\n</think>\n\n"}]
    row = {
        "messages": [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "structure": thought + STRUCTURE},
            {"role": "user", "content": "Two?"},
        ],
        "answer": "Two.",
    }
    examples, skipped = encode_conversation(own, record_of(row), structured=True)
    assert len(examples) == 2 and not skipped
    special = own.codec.special
    for item in examples:
        assert (item.tokens == special.branch_start).sum() == 2
    first, second = (own.tokenizer.decode(item.tokens) for item in examples)
    assert "[assistant]\n<think>\nLet me see.\n</think>\n\nTwo:\n" in first and "Let me see" not in second
    assert "[assistant]\nTwo:\n<|title|>" in second


def test_turns_that_cannot_be_asked_for_are_left_out_and_named(lm: LanguageModel, tmp_path: Path) -> None:
    greeting = [{"role": "assistant", "content": "Welcome!"}, *PLAIN["messages"][:2]]
    empty = [*PLAIN["messages"][:1], {"role": "assistant", "content": " "}, *PLAIN["messages"][2:4]]
    rows = [
        PLAIN,
        {"messages": greeting},
        {"messages": [*PLAIN["messages"][:2], {"role": "user", "content": "And?"}]},
        {"messages": empty},
        {"messages": [{"role": "user", "content": "a"}, *PLAIN["messages"][:2]]},
        {"messages": [{"role": "system", "content": "a"}, *PLAIN["messages"][1:4]]},
    ]
    file = write(tmp_path / "data.jsonl", rows)

    def read(template: str, name: str) -> tuple[int, list[tuple[int, str, str]]]:
        records = Records(with_template(lm, template), [file], DataSection(length=256), tmp_path / name)
        assert all(f"{file}, line {p.line}: {p.reason}" in records.report() for p in records.problems[:5])
        return len(records), [(p.line, p.kind, p.reason) for p in records.problems]

    turn = [
        (2, "turn", "messages[0]: expected a message that asks for this answer, got none"),
        (3, "turn", "messages[2]: no answer follows"),
        (4, "turn", "messages[1]: answer: expected text, got none"),
    ]
    assert read(TEMPLATES["plain"], "plain") == (6, turn)
    count, problems = read(TEMPLATES["alternates"], "alternates")
    assert count == 4 and problems[1:3] == turn[1:]
    assert [(line, kind) for line, kind, _ in problems if line in (2, 5, 6)] == [
        (2, "malformed"), (5, "malformed"), (6, "turn")
    ]  # fmt: skip
    reasons = {line: reason for line, _, reason in problems}
    refused = "messages: the chat template refuses a conversation of {}: roles must alternate"
    assert refused.format("user, user") == reasons[5] and refused.format("assistant, user") in reasons[2]


def test_an_engine_takes_a_greeting_where_the_template_does(lm: LanguageModel) -> None:
    said = [{"role": "assistant", "content": "Welcome!"}, {"role": "user", "content": "Hi"}]
    own = with_template(lm, TEMPLATES["plain"])
    ids = Engine(own, max_length=256, max_batch=1).encode(said)
    assert own.tokenizer.decode(ids) == own.tokenizer.apply_chat_template(
        said, tokenize=False, add_generation_prompt=True
    )
    strict = Engine(with_template(lm, TEMPLATES["alternates"]), max_length=256, max_batch=1)
    with pytest.raises(RequestError, match="refuses a conversation of assistant, user: roles must alternate"):
        strict.encode(said)
    broken = Engine(with_template(lm, "{{ messages[0].name.first }}"), max_length=256, max_batch=1)
    with pytest.raises(RequestError, match="refuses a conversation of assistant, user: UndefinedError"):
        broken.encode(said)
    for prompt in ("\ud83d", [{"role": "user", "content": "\ud83d"}]):
        with pytest.raises(RequestError, match="expected Unicode text, got an unpaired surrogate"):
            strict.encode(prompt)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            turns("[assistant]\n", "[assistant]\n"),
            r"messages\[1\]: expected a chat template that shows this answer unchanged",
        ),
        (turns(ANSWER + "[assistant]\n{{ c | upper }}", "[assistant]\n"), None),
        (
            turns("{{ m.content | length }}{{ m.content }}", ""),
            r"messages\[1\]: expected a chat template that writes equal text",
        ),
    ],
)
def test_templates_that_change_answers(lm: LanguageModel, template: str, reason: str | None) -> None:
    """Check that an earlier answer has the template's form, and that a template that hides its end is refused."""
    own = with_template(lm, template)
    engine = Engine(own, max_length=256, max_batch=1)
    messages = PLAIN["messages"][:3]
    if reason is None:
        assert "HELLO." in own.tokenizer.decode(engine.encode(messages))
        return
    with pytest.raises(ConversationError, match=reason):
        engine.encode(messages)


def test_real_templates(lm: LanguageModel) -> None:
    file = shared("data", "tokenizers", "minimind_tokenizer_config.json")
    template = json.loads(file.read_text())["chat_template"]
    own = with_template(lm, template)
    engine, messages = Engine(own, max_length=512, max_batch=1), PLAIN["messages"]
    found, skipped = learned(own, PLAIN)
    assert not skipped and [before for before, _ in found] == [engine.encode(messages[:place]) for place in (1, 3, 5)]
    for place, (before, _) in zip((1, 3, 5), found, strict=True):
        prompt = own.tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
        assert own.tokenizer.decode(before) == prompt


def test_the_second_of_two_answers_in_a_row_is_left_out(lm: LanguageModel, tmp_path: Path) -> None:
    """Check that the second answer is left out; the engine refuses a prompt that ends with an answer."""
    row = {"messages": [*PLAIN["messages"][:2], {"role": "assistant", "content": "More."}]}
    file = write(tmp_path / "data.jsonl", [row])
    records = Records(lm, [file], DataSection(length=256), tmp_path / "cache")
    assert len(records) == 1 and [(p.line, p.reason) for p in records.problems] == [
        (1, "messages[2]: expected a message that asks for this answer, got none")
    ]


def test_vicuna_is_asked_as_by_fastchat(lm: LanguageModel) -> None:
    """Compare the included template with prompts of FastChat's conversation `vicuna_v1.1`."""
    config = read_config(TrainConfig, ROOT / "configs" / "vicuna_7b.yaml")
    assert config.data.chat_template == read_config(TrainConfig, ROOT / "configs" / "lora_7b.yaml").data.chat_template
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.chat_template = find_config(config.data.chat_template).read_text()
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )

    def prompt(*roles: str) -> Any:
        messages = [{"role": role, "content": f"{number}."} for number, role in enumerate(roles)]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert prompt("user") == f"<s>{system} USER: 0. ASSISTANT:"
    assert prompt("user", "assistant", "user") == f"<s>{system} USER: 0. ASSISTANT: 1.</s>USER: 2. ASSISTANT:"
    assert prompt("system", "user") == "<s>0. USER: 1. ASSISTANT:"
    for roles in (("user", "tool"), ("user", "system")):
        with pytest.raises(
            TemplateError, match=f"role: expected user or assistant after the first message, got {roles[1]}"
        ):
            prompt(*roles)
