"""The forms of `/v1/completions`, grammars as vLLM names them, and answers that go on, over a real connection."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd_jax.layout import build_layout
from infer import Engine, SamplingParams
from tests.helpers.serving import Running, ask

SERIAL = {"aspd": {"mode": "serial"}}
PROMPTS = ["Price each line.\n3 pens at $20", "4 books"]


def post(server: Running, path: str = "completions", status: int = 200, **fields: Any) -> Any:
    body = {"model": "demo", "temperature": 0, **SERIAL} | fields
    reply = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=300)
    assert reply.status_code == status, reply.text
    return reply.json()


def full_pass(engine: Engine, ids: list[int]) -> np.ndarray:
    """Return the log probabilities of the token after each token, [S, V]."""
    lm = engine.lm
    tokens = np.asarray([ids], np.int32)
    assert lm.special_tokens is not None
    layout = build_layout(tokens, lm.special_tokens, lm.config.positions)
    logits = lm.model.apply({"params": lm.params}, tokens, layout)
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)[0]), np.float64)


@pytest.mark.further
def test_prompts_come_in_four_forms(server: Running) -> None:
    """Check that choices follow the order of the prompts, n for each; usage counts every prompt once."""
    ids = [server.engine.encode(prompt) for prompt in PROMPTS]
    whole = [post(server, prompt=prompt, max_tokens=6) for prompt in PROMPTS]
    texts = [answer["choices"][0]["text"] for answer in whole]
    for prompt in (PROMPTS, ids):
        both = post(server, prompt=prompt, max_tokens=6)
        assert [choice["text"] for choice in both["choices"]] == texts
        assert both["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert post(server, prompt=ids[0], max_tokens=6)["choices"][0]["text"] == texts[0]
    sampled = post(server, prompt=PROMPTS, n=2, temperature=1.5, seed=4, max_tokens=6)
    assert [choice["index"] for choice in sampled["choices"]] == [0, 1, 2, 3]
    assert sampled["usage"]["prompt_tokens"] == sum(map(len, ids))
    alone = [post(server, prompt=prompt, n=2, temperature=1.5, seed=4, max_tokens=6) for prompt in PROMPTS]
    assert [c["text"] for c in sampled["choices"]] == [c["text"] for answer in alone for c in answer["choices"]]
    assert len({choice["text"] for choice in sampled["choices"]}) == 4


def test_a_completion_has_sixteen_tokens_where_nothing_else_is_asked_for(server: Running) -> None:
    held = {"temperature": 2, "seed": 1, "ignore_eos": True}
    assert post(server, prompt="x", **held)["usage"]["completion_tokens"] == 16
    assert post(server, prompt="x", max_tokens=None, suffix=None, **held)["usage"]["completion_tokens"] == 16
    assert post(server, prompt="x", max_tokens=20, **held)["usage"]["completion_tokens"] == 20


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_gives_the_log_probabilities_of_a_full_pass(server: Running, max_tokens: int) -> None:
    ids = [server.engine.encode(prompt) for prompt in PROMPTS]
    answer = post(server, prompt=ids, max_tokens=max_tokens, echo=True, logprobs=2)
    for choice, own, prompt in zip(answer["choices"], ids, PROMPTS, strict=True):
        likely = choice["logprobs"]
        count = len(own) + max_tokens
        assert {len(values) for values in likely.values()} == {count}
        assert likely["token_logprobs"][0] is None and likely["top_logprobs"][0] is None
        expected = full_pass(server.engine, own)
        found = likely["token_logprobs"][1 : len(own)]
        np.testing.assert_allclose(found, expected[np.arange(len(own) - 1), own[1:]], atol=1e-4)
        best = [max(of.values()) for of in likely["top_logprobs"][1 : len(own)]]
        np.testing.assert_allclose(best, expected[:-1].max(axis=1), atol=1e-4)
        assert all(2 <= len(of) <= 3 and min(of.values()) <= value for of, value in zip(
            likely["top_logprobs"][1:], likely["token_logprobs"][1:], strict=True
        ))  # fmt: skip
        assert choice["text"].startswith(prompt) and (choice["text"] == prompt) == (max_tokens == 0)
        for token, offset in zip(likely["tokens"], likely["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
    assert answer["usage"]["completion_tokens"] == len(ids) * max_tokens
    wrong = full_pass(server.engine, ids[0][::-1])
    assert abs(wrong[0, ids[0][-2]] - answer["choices"][0]["logprobs"]["token_logprobs"][1]) > 1e-3, "negative control"


@pytest.mark.further
def test_echo_has_the_end_of_text_that_was_sampled(server: Running) -> None:
    """Check that echo returns one token more than the prompt has, whatever the model samples first."""
    end = server.engine.config.end[0]
    answer = post(server, prompt="x", max_tokens=1, echo=True, logprobs=1, logit_bias={end: 100})
    named = post(
        server, prompt="x", max_tokens=1, echo=True, logprobs=1, logit_bias={end: 100}, return_tokens_as_token_ids=True
    )["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{token}" for token in (*server.engine.encode("x"), end)]
    assert set(map(len, named["top_logprobs"][1:])) <= {1, 2} and named["text_offset"][0] == 0
    assert answer["choices"][0]["text"] == "x" and answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(server.engine.encode("x")) + 1


def test_offsets_of_characters_of_several_tokens(server: Running) -> None:
    text = "añ日本🙂b"
    likely = post(server, prompt=text, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert likely["text_offset"] == sorted(likely["text_offset"]) and likely["text_offset"][-1] == len(text) - 1
    assert len(likely["tokens"]) > len(text), "negative control: some character has several"


def test_a_stream_begins_with_the_echo(server: Running) -> None:
    texts, logprobs = ["", ""], [None, None]
    for chunk in server.client().completions.create(
        model="demo", prompt=PROMPTS, echo=True, stream=True, max_tokens=4, logprobs=1, temperature=0, extra_body=SERIAL
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        logprobs[chunk.choices[0].index] = chunk.choices[0].logprobs or logprobs[chunk.choices[0].index]
    whole = post(server, prompt=PROMPTS, echo=True, max_tokens=4, logprobs=1)
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert [of.model_dump() for of in logprobs if of] == [choice["logprobs"] for choice in whole["choices"]]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]"}}, "[a-c]{3}-[0-9]"),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, "(yes|no)!"),
        ({"structured_outputs": {"choice": ['say "no"\n', "nö"]}}, 'say "no"\n|nö'),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z")'}}, "x[yz]"),
        ({"structured_outputs": {"grammar": 'start: "x" /[yz]/'}}, "x[yz]"),
    ],
)
def test_answers_follow_their_grammar(server: Running, fields: dict[str, Any], pattern: str) -> None:
    for seed in (1, 2):
        answer = post(server, prompt="x", temperature=2, seed=seed, max_tokens=40, **fields)["choices"][0]
        assert re.fullmatch(pattern, answer["text"]) and answer["finish_reason"] == "stop"
    free = post(server, prompt="x", temperature=2, seed=1, max_tokens=40)["choices"][0]
    assert not re.fullmatch(pattern, free["text"]), "negative control"


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}},
        {"structured_outputs": {"json": '{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}'}},
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_answers_are_json(server: Running, fields: dict[str, Any]) -> None:
    (brace,) = server.engine.lm.codec.text.encode("}")
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "logit_bias": {brace: 100}} | fields
    answer = post(server, "chat/completions", **asked)["choices"][0]
    assert answer["finish_reason"] == "stop" and isinstance(json.loads(answer["message"]["content"]), dict)


def test_an_answer_goes_on(server: Running) -> None:
    """Check the rest of an answer after its beginning; the engine returns the same."""
    messages = ask()["messages"]
    whole = post(server, "chat/completions", messages=messages)["choices"][0]["message"]["content"]
    begun = [*messages, {"role": "assistant", "content": whole[:12]}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    rest = post(server, "chat/completions", messages=begun, **going_on)["choices"][0]["message"]["content"]
    ids = server.engine.encode(begun, continue_final_message=True)
    params = SamplingParams(max_new_tokens=400)
    assert server.engine.generate([ids], params, "serial")[0].text == rest
    assert server.engine.lm.codec.text.decode(ids).endswith(whole[:12])
    assert rest and whole[:12] + rest == whole


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("completions", {"prompt": [[1], [2, 99999]]}, "prompt[1]: token ids: expected ids from 0"),
        ("completions", {"prompt": ["x"] * 99}, "prompt: expected at most 66 prompts"),
        ("completions", {"prompt": [[1], []]}, "prompt[1]: prompt: expected at least one token"),
        ("completions", {"prompt": "x", "n": 2, "stream": False, "max_tokens": -1}, "max_tokens"),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of: expected 1 or null, got 2"),
        ("completions", {"prompt": "x", "n": 99}, "n: expected at most 8 answers"),
        ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias: expected numbers by token id"),
        ("completions", {"prompt": "x", "logit_bias": {"1_0": 1}}, "logit_bias: expected numbers by token id"),
        ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias: expected ids from 0"),
        ("completions", {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
        ("completions", {"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
        ("completions", {"prompt": "x", "max_tokens": 4, "min_tokens": 5}, "min_tokens: expected 0 to"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "a("}}, "regex: "),
        ("completions", {"prompt": "x", "structured_outputs": {"grammar": "root ::= ("}}, "grammar: "),
        ("completions", {"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs"),
        (
            "completions",
            {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs: expected one of structured_outputs.regex and structured_outputs.choice, got 2",
        ),
        (
            "completions",
            {"prompt": "x", "guided_regex": "a"},
            "guided_regex: the field is structured_outputs.regex; expected null, got 'a'",
        ),
        ("completions", {"prompt": "x", "structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ("chat/completions", {"messages": ask()["messages"], "continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"messages": ask()["messages"], "add_generation_prompt": False}, "add_generation_prompt"),
    ],
)  # fmt: skip
def test_mistakes_are_named(server: Running, path: str, fields: dict[str, Any], said: str) -> None:
    assert said in post(server, path, 400, **fields)["error"]["message"]
