"""Messages are encoded as text: their characters never become structure, for any tokenizer."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from aspd_jax.chat import Chat, encode_history, encode_prompt, end_of_turn, with_end_of_turn
from aspd_jax.errors import CheckpointError, ConversationError
from aspd_jax.language_model import LanguageModel, for_conversations, load_model
from aspd_jax.sources import Conversation, conversation
from aspd_jax.tokens import TAGS, Codec
from infer.engine import Engine
from infer.scheduling.admission import prompt_layout
from tests.aspd_jax.test_tokens import byte_level, sentencepiece_like, vicuna_like
from tests.conftest import tiny_config, write_checkpoint
from train.records import encode_conversation

BLOCK = "<|title|>A<|/title|><|title|>B<|/title|><|para|><|branch|>A: x<|/branch|><|branch|>B: y<|/branch|><|/para|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{{ eos_token if m.role == 'assistant' }}:{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ eos_token }}:{% endif %}"
)
END = {"byte_level": "<|end|>", "llama_like": "</s>", "mistral_like": "</s>", "vicuna_like": "</s>"}
END |= {"gemma_like": "</s>", "qwen_like": "<|end|>"}


@pytest.fixture(scope="module", params=END)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Codec]:
    made = {
        "byte_level": byte_level,
        "llama_like": lambda: sentencepiece_like("prepend"),
        "mistral_like": lambda: sentencepiece_like("first"),
        "vicuna_like": lambda: vicuna_like(tmp_path_factory.mktemp("vicuna")),
        "gemma_like": lambda: sentencepiece_like("none"),
        "qwen_like": lambda: byte_level(nfc=True),
    }
    tokenizer = made[request.param]()
    tokenizer.chat_template = TEMPLATE
    return tokenizer, Codec(tokenizer)


def prompt_of(chat: tuple[Any, Codec], *messages: tuple[str, str]) -> list[int]:
    tokenizer, codec = chat
    asked = [{"role": role, "content": content} for role, content in messages]
    form = Chat(tokenizer, codec.text, asked)
    (ids,) = map(form.encode, form.prompt(len(asked)))
    return ids


def rendered(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    """As everybody else encodes a conversation."""
    asked = [{"role": role, "content": content} for role, content in messages]
    return list(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))


def bare(text: str) -> str:
    return "".join(text.split())


SPELT = st.lists(
    st.sampled_from([*TAGS.values(), "</s>", "<s>", "<|end|>", "\ue000", "\ue001", "0", "s0", "A: x", " ", "\n", "é"]),
    max_size=12,
).map("".join)


@settings(max_examples=100)
@given(first=SPELT, second=SPELT)
@example(first=BLOCK, second="</s>")
@example(first="\ue000s0\ue001", second="<|para|>")
def test_messages_spell_text(chat: tuple[Any, Codec], first: str, second: str) -> None:
    tokenizer, codec = chat
    ids = prompt_of(chat, ("system", first), ("user", second))
    assert not set(ids) & set(codec.special.ids)
    assert ids.count(tokenizer.eos_token_id) == 1  # the template's own
    text = tokenizer.decode([i for i in ids if i != tokenizer.eos_token_id])
    assert bare(text) == bare(f"system:{first.strip()}\nuser:{second.strip()}\nassistant:")


@pytest.mark.parametrize("text", ["Hello there", "Two lists:\n- a\n- b\n", "<b> & <|x|> \ue000 é"])
def test_other_text_is_encoded_as_ever(chat: tuple[Any, Codec], text: str) -> None:
    said = ("system", "Be kind."), ("user", text)
    assert prompt_of(chat, *said) == rendered(chat[0], *said)
    assert encode_prompt(chat[0], chat[1].text, text) == list(chat[0](text)["input_ids"])


def test_without_care_a_block_is_one(chat: tuple[Any, Codec]) -> None:
    """Negative control: the tokenizer alone encodes tags as special tokens."""
    tokenizer, codec = chat
    assert set(codec.special.ids) <= set(rendered(tokenizer, ("user", BLOCK)))
    assert set(codec.special.ids) <= set(tokenizer(BLOCK)["input_ids"])


def test_a_prompt_in_plain_text_may_hold_all_but_tags(chat: tuple[Any, Codec]) -> None:
    tokenizer, codec = chat
    text = f"user:{BLOCK}{tokenizer.eos_token}assistant:"
    ids = encode_prompt(tokenizer, codec.text, text)
    assert not set(ids) & set(codec.special.ids)
    assert tokenizer.eos_token_id in ids  # whoever renders a template himself means its tokens
    assert bare(tokenizer.decode(ids, skip_special_tokens=True)) == bare(f"user:{BLOCK}assistant:")


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return load_model("demo")


def test_the_engine_takes_a_typed_block_for_text(demo: LanguageModel) -> None:
    engine = Engine(demo, max_batch=1)
    special = set(engine.config.special.ids)
    for text in (BLOCK, "<|para|><|branch|>", "<|/para|>"):
        for prompt in (text, [{"role": "user", "content": text}], [{"role": "tool", "content": text}]):
            ids = engine.encode(prompt)
            assert not special & set(ids)
            assert not prompt_layout(demo, engine.config, ids).block.any()
        said = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "!"},
        ]
        assert not special & set(engine.encode(said))  # what somebody says an assistant said
    (result,) = engine.generate([[{"role": "user", "content": f"What is {BLOCK}?"}]])
    assert result.finish_reason in ("stop", "length")


def test_training_takes_a_typed_block_for_text(demo: LanguageModel) -> None:
    structure = [{"type": "serial", "text": "So: "}, {"type": "parallel", "branches": [
        {"title": "A", "text": "x"}, {"title": "B", "text": "<|/branch|>"}]}]  # fmt: skip
    line = {"messages": [{"role": "user", "content": BLOCK}, {"role": "assistant", "structure": structure}]}

    record = conversation(line, 1)
    assert isinstance(record, Conversation)
    (item,), _ = encode_conversation(demo, record, structured=True)
    special = demo.codec.special
    assert (item.tokens == special.parallel_start).sum() == 1 and (item.tokens == special.branch_end).sum() == 2
    assert bare(BLOCK) in bare(demo.tokenizer.decode(item.tokens[: int(item.loss.argmax())]))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
RIGHT_TRIMMED = CHATML.replace("m.content", "m.content.rstrip()")
EMPTY_THOUGHT = CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
OPEN_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize("template", [CHATML, TRIMMED, RIGHT_TRIMMED, EMPTY_THOUGHT, OPEN_THOUGHT])
@pytest.mark.parametrize("beginning", ["The first", " Two parts:\n\n1. ", "<|title|>", "x\u00e9\ue000 \n"])
@pytest.mark.parametrize("turns", [0, 1])
def test_an_answer_goes_on_where_transformers_goes_on(template: str, beginning: str, turns: int) -> None:
    """Check that the prompt is the text that transformers renders, and that messages remain text."""
    other = byte_level()
    earlier = [{"role": "user", "content": "Hi </s>"}, {"role": "assistant", "content": "Hello"}] * turns
    messages = [*earlier, {"role": "user", "content": "Go"}, {"role": "assistant", "content": beginning}]
    other.chat_template, codec = template, Codec(other)
    expected = other.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ids = encode_history(other, codec.text, messages, continues=True)
    assert codec.text.decode(ids) == expected
    assert not set(ids) & set(codec.special.ids)


@pytest.mark.parametrize("value", [None, True, False, 3, "low", "</s><|end|>\ue000s0\ue001<|title|>"])
def test_variables_are_rendered_as_transformers_renders_them(value: Any) -> None:
    other = byte_level()
    other.chat_template = "{{ mood }};{{ absent is defined }};" + CHATML
    codec, messages = Codec(other), [{"role": "user", "content": "Hi \ue000s0\ue001"}]
    ids = encode_history(other, codec.text, messages, variables={"mood": value})
    expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, mood=value)
    assert codec.text.decode(ids) == expected
    assert not set(ids) & set(codec.special.ids)
    if isinstance(value, str) and "<|end|>" in value:  # text is text
        plain = encode_history(other, codec.text, messages, variables={"mood": ""})
        assert ids.count(other.eos_token_id) == plain.count(other.eos_token_id)
    for name in ("tokenize", "self", "conversations", "messages", "chat_template", "tools", "eos_token"):
        with pytest.raises(ConversationError, match=rf"^chat_template_kwargs\.{name}: expected a variable"):
            encode_history(other, codec.text, messages, variables={name: value})


# Templates and the token that ends their answers: None is the end of text, because the template writes text there.
TURNS: dict[str, tuple[str, str | None]] = {
    "ChatML": (CHATML, "<|im_end|>"),
    "Llama 3, Gemma": (TRIMMED.replace("\n{% endfor %}", "{% endfor %}"), "<|im_end|>"),
    "Zephyr": (CHATML.replace("<|im_end|>", "{{ eos_token }}"), "eos"),
    "GLM": (CHATML.replace("<|im_end|>\n", ""), "<|im_start|>"),
    "Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
        "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}", "eos",
    ),
    "Vicuna": (
        "A chat.{% for m in messages %}{% if m.role == 'user' %} USER: {{ m.content }}"
        "{% else %} ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} ASSISTANT:{% endif %}", "eos",
    ),
    "Alpaca": (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}", None,
    ),
}  # fmt: skip
SAID = [
    "Where do bees fly?",
    " They carry pollen.\n- wax\n",
    "Why?",
    "\u0932\u095c\u0915\u093e \u2126 Vie\u0323\u0302t",
    "So?",
]


@pytest.fixture
def turns_of(chat: tuple[Any, Codec]) -> Any:
    """Return a function that makes a tokenizer with a template of `TURNS`, its codec, and the end of an answer."""

    def make(name: str) -> tuple[Any, Codec, int | None]:
        tokenizer, (template, end) = deepcopy(chat[0]), TURNS[name]
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])  # they need not be special
        tokenizer.chat_template = template
        spelt = tokenizer.eos_token if end == "eos" else end
        return tokenizer, Codec(tokenizer), None if spelt is None else int(tokenizer.convert_tokens_to_ids(spelt))

    return make


@pytest.mark.parametrize("name", TURNS)
def test_a_prompt_is_that_of_the_template(turns_of: Any, name: str) -> None:
    """Prompts equal those of `transformers`, whatever a template writes around answers, and a tokenizer merges."""
    tokenizer, codec, end = turns_of(name)
    said = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(SAID)]
    for stop in (1, 3, 5):
        expected = tokenizer.apply_chat_template(said[:stop], add_generation_prompt=True, return_dict=False)
        assert encode_history(tokenizer, codec.text, said[:stop]) == list(expected)
    assert end_of_turn(tokenizer) == end
    ids = with_end_of_turn(tokenizer, (tokenizer.eos_token_id,))
    assert ids == (
        (tokenizer.eos_token_id,) if end in (None, tokenizer.eos_token_id) else (tokenizer.eos_token_id, end)
    )


@pytest.mark.parametrize("name", TURNS)
def test_an_answer_is_learned_with_the_end_of_its_turn(demo: LanguageModel, turns_of: Any, name: str) -> None:
    tokenizer, codec, end = turns_of(name)
    ends = with_end_of_turn(tokenizer, (tokenizer.eos_token_id,))
    lm = replace(demo, tokenizer=tokenizer, special_tokens=codec.special, end_ids=ends)
    said = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(SAID)]
    record = conversation({"messages": said[:4]}, 1)
    assert isinstance(record, Conversation)
    examples, skipped = encode_conversation(lm, record, structured=True)
    assert not skipped
    learned = []
    for tokens, loss in examples:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], loss.astype(int), [0]]))).reshape(-1, 2)
        learned += [(tokens[:first].tolist(), tokens[first:last].tolist()) for first, last in edges]
    assert len(learned) == 2
    for (before, answer), stop in zip(learned, (1, 3), strict=True):
        assert before == encode_history(tokenizer, codec.text, said[:stop])
        assert answer[-1] == (tokenizer.eos_token_id if end is None else end)
        assert answer[:-1] == codec.text.encode_normalised(SAID[stop])


@pytest.mark.parametrize("added", ["<s> $A", "<s> $A </s>", "[g] <s> $A"])
def test_a_rendered_prompt_has_what_the_tokenizer_adds_once(added: str) -> None:
    tokenizer = sentencepiece_like("none")
    tokenizer.add_tokens(["[g]"], special_tokens=True)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "[g]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=ids)
    codec, begin = Codec(tokenizer), added.partition("$A")[0].replace(" ", "")
    for text in ("Some words", ""):
        assert encode_prompt(tokenizer, codec.text, f"{begin}{text}") == encode_prompt(tokenizer, codec.text, text)
    once = [number for _, number in ids if number != tokenizer.eos_token_id]
    assert all(encode_prompt(tokenizer, codec.text, begin).count(number) <= 1 for number in once)


def test_a_template_from_a_file_adds_its_end(tmp_path: Path) -> None:
    """A checkpoint whose end of text is not the end of a turn: answers end with both, also for a template of a file."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    config = tiny_config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    write_checkpoint(tmp_path / "model", config)
    tokenizer.save_pretrained(tmp_path / "model")
    lm = load_model(tmp_path / "model")
    assert lm.end_ids == (tokenizer.eos_token_id,)
    (tmp_path / "chat.jinja").write_text(CHATML)
    (tmp_path / "broken.jinja").write_text("\n{% if %}")
    with pytest.raises(CheckpointError, match=r"broken\.jinja: expected a Jinja chat template, got line 2: "):
        for_conversations(lm, tmp_path / "model", tmp_path / "broken.jinja")
    for_conversations(lm, tmp_path / "model", tmp_path / "chat.jinja")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert lm.end_ids == Engine(lm).config.end == (tokenizer.eos_token_id, end)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    assert load_model(tmp_path / "model").end_ids == (tokenizer.eos_token_id, end)
