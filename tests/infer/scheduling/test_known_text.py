"""Text that a grammar, a schema or a template determines is the answer, character by character, whatever it spells."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers

from aspd_jax import load_model
from aspd_jax.errors import RequestError
from aspd_jax.template import Hole, Template
from aspd_jax.tool_format import ToolFormat
from infer import Engine, SamplingParams
from infer.server.tool_calls import Function, ToolCalls, ToolChoice
from tests.aspd_jax.test_byte_tokens import gemma_like
from tests.aspd_jax.test_tokens import byte_level, sentencepiece_like
from tests.conftest import tiny_config, with_one_program, write_checkpoint
from tests.infer.scheduling.test_structured_output import record

pytestmark = pytest.mark.further

# An end of text, our own tag, an added token, NFC changes these three, and spaces that decoders drop.
OHM, HINDI, CAFE = "10 k\u2126", "\u092c\u095c\u093e", "cafe\u0301"
TEXTS = ("<|end|>", "</s>", "<|title|>", "<think>", OHM, HINDI, CAFE, " a", "▁b", "<0x0A>")
SPELLED = ("<|end|>", "<|title|>", OHM)
MAKERS = {
    "nfc": (byte_level, normalizers.NFC(), "<|end|>"),
    "llama": (lambda: sentencepiece_like("prepend"), None, "</s>"),
    "gemma": (gemma_like, normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")]), "</s>"),
}


@pytest.fixture(scope="module", params=MAKERS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of one row over a tiny model with a tokenizer that changes text."""
    make, normalizer, end = MAKERS[request.param]
    tokenizer = make()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    config = tiny_config(
        max_position_embeddings=1024, vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids(end)
    )
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), config, seed=1)
    tokenizer.save_pretrained(folder)
    return with_one_program(Engine(load_model(folder), max_length=1024, max_batch=1))


def ask(engine: Engine, **fields: Any) -> str:
    params = SamplingParams(max_new_tokens=480, temperature=1.0, seed=1, **fields)
    result = engine.generate(["Some words"], params)[0]
    assert result.finish_reason == "stop", (result.text, result.error)
    return result.text


def test_choices(engine: Engine) -> None:
    for text in TEXTS:
        assert ask(engine, choices=[text]) == text
    for seed in range(4):
        texts = [*TEXTS[seed:], "no"]
        assert ask(engine, choices=texts) in texts


def test_regular_expressions_and_grammars(engine: Engine) -> None:
    assert re.fullmatch("<think>ok</think>(yes|no)", ask(engine, regex="<think>ok</think>(yes|no)"))
    assert ask(engine, regex="cafe\u0301 k\u2126(!|\\?)")[:-1] == "cafe\u0301 k\u2126"
    assert ask(engine, grammar='start: "<|title|>" /[ab]/ "cafe\u0301"')[9:] in ("acafe\u0301", "bcafe\u0301")


@pytest.mark.parametrize("fields", ["serial", "parallel"])
def test_names_and_constants(engine: Engine, fields: Any) -> None:
    known = record(**{text: {"const": text} for text in TEXTS})
    schema = record(**{text: {"enum": [text, "x"]} for text in SPELLED}, known=known, last={"type": "boolean"})
    value = json.loads(ask(engine, json_schema=schema, fields=fields))
    assert list(value) == [*SPELLED, "known", "last"] and value["known"] == {text: text for text in TEXTS}
    assert all(value[text] in (text, "x") for text in SPELLED)


def test_arguments_of_tools(engine: Engine) -> None:
    """Check a grammar with names, constants and tags in the arguments of a call, in a format with markers by id."""
    codec = engine.lm.codec.text
    arguments = record(**{text: {"const": text} for text in SPELLED})
    form = ToolFormat("<think>call ", ": ", None, "</think>", "")
    calls = ToolCalls([Function("f", "", arguments)], ToolChoice("required", "f", False), form, codec)
    text = ask(engine, grammar=calls.grammar)
    assert json.loads(text.split("f: ")[1].rstrip().removesuffix("</think>")) == {text: text for text in SPELLED}


def test_templates(engine: Engine) -> None:
    hole = Hole("a", schema=json.dumps({"type": "boolean"}))
    parts = f"<|title|>{CAFE}\n{OHM}<think>:", hole, f"\n<|end|>:{HINDI}: ", replace(hole, name="b"), "</s>"
    answer = ask(engine, template=Template(parts))
    assert re.sub("true|false", "*", answer) == "".join(part if isinstance(part, str) else "*" for part in parts)


def test_a_space_that_the_tokenizer_drops_is_refused_in_a_grammar(engine: Engine) -> None:
    if engine.lm.codec.text.drops_space:
        with pytest.raises(RequestError, match="grammar: expected text without a space at its beginning"):
            engine.check("Some words", SamplingParams(grammar='start: " a"'))
    else:
        assert ask(engine, grammar='start: " a"') == " a"
