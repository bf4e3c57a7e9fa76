"""The library as its users call it: parameters of any type, several answers, log probabilities, streams, models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from aspd_jax import LanguageModel, load_model
from aspd_jax.errors import CheckpointError, RequestError
from aspd_jax.language_model import dtype_name
from aspd_jax.layout import build_layout
from infer import Engine, SamplingParams
from infer.request import PARAMETERS
from tests.conftest import SIZES

DEFAULT = SamplingParams()


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


@pytest.mark.parametrize("name", PARAMETERS)
def test_none_means_the_default(name: str) -> None:
    assert SamplingParams(**{name: None}) == DEFAULT


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("temperature", "0.7", "temperature: expected a number, got '0.7'."),
        ("temperature", True, "temperature: expected a number, got True."),
        ("max_new_tokens", 2.5, "max_new_tokens: expected an integer, got 2.5."),
        ("max_new_tokens", 5.0, "max_new_tokens: expected an integer, got 5.0."),
        ("top_k", 5.5, "top_k: expected an integer, got 5.5."),
        ("min_tokens", np.float32(2), "min_tokens: expected an integer, got "),
        ("seed", "x", "seed: expected an integer, got 'x'."),
        ("logit_bias", {1: "a"}, "logit_bias[1]: expected a number, got 'a'."),
        ("logit_bias", {1: 101}, "logit_bias[1]: expected between -100 and 100, got 101."),
        ("logit_bias", [1], "logit_bias: expected numbers by token id, got [1]."),
        ("stop", 5, "stop: expected strings, got 5."),
        ("stop", ["a", 5], "stop: expected non-empty strings, got ['a', 5]."),
        ("choices", {"a": 1}, "choices: expected strings, got {'a': 1}."),
        ("regex", 5, "regex: expected a non-empty string, got 5."),
        ("grammar", "", "grammar: expected a non-empty string, got ''."),
        ("script", [1], "script: expected lists of token ids, got [1]."),
        ("json_schema", int, "json_schema: expected a JSON schema, got: type instead of an object, text or"),
        ("json_schema", 5, "json_schema: expected a JSON schema, got: int instead of an object, text or"),
        ("n", 0, "n: expected 1 or more, got 0."),
        ("logprobs", 21, "logprobs: expected between 0 and 20, got 21."),
    ],
)
def test_wrong_values_name_their_field(field: str, value: Any, error: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(error)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(4): 1})
    assert params == SamplingParams(temperature=0.5, top_k=3, logit_bias={"4": 1.0})
    assert type(params.temperature) is float and type(params.top_k) is int


def test_parameters_are_hashable() -> None:
    first, same = (SamplingParams(temperature=0.5, stop="a", logit_bias={1: 2}, template="A:{a}") for _ in range(2))
    assert {first: "found"}[same] == "found" and hash(first) == hash(same)


def test_descriptions_are_plain_text() -> None:
    """Check that every field has a description in the source of the class, which editors and the CLI show."""
    assert all(parameter.help for parameter in PARAMETERS.values())
    assert PARAMETERS["temperature"].help == "divisor of the logits; 0: greedy decoding"
    assert PARAMETERS["repetition_penalty"].help.endswith("(for a title: in visible titles); 1: none")
    assert set(PARAMETERS) <= set((SamplingParams.__doc__ or "").replace(":", " ").split())


def test_a_pydantic_class_is_a_schema() -> None:
    schema = SamplingParams(json_schema=Person).json_schema
    assert json.loads(str(schema)) == Person.model_json_schema()
    assert SamplingParams(json_schema=Person, fields="parallel").known_text is not None


def test_parameters_of_another_type_are_refused(engine: Engine) -> None:
    expected = (
        r"request 0: params: expected SamplingParams, got \{'temperature': 1\}. Write SamplingParams\(name=value\)."
    )
    with pytest.raises(RequestError, match=expected):
        engine.generate(["x"], {"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"params: expected SamplingParams, got \{\}"):
        engine.submit("x", {})  # type: ignore[arg-type]


def test_several_answers(engine: Engine) -> None:
    """Check that the answers are those of the seeds from the given one on, in order."""
    params = SamplingParams(temperature=2.0, seed=5, n=3, max_new_tokens=12)
    several, one = engine.generate(["Run", "Walk"], [params, replace(params, n=1)])
    alone = [engine.generate(["Run"], replace(params, n=1, seed=seed))[0].token_ids for seed in (5, 6, 7)]
    assert [result.token_ids for result in several.outputs] == alone and several.token_ids == alone[0]
    assert len(set(map(tuple, alone))) > 1 and one.outputs == (one,)
    with pytest.raises(RequestError, match="n: expected 1, got 3; only generate returns several answers"):
        engine.submit("Run", params)


def test_log_probabilities(engine: Engine, lm: LanguageModel) -> None:
    """Check them against a full pass over prompt and answer; a stream ends with the same."""
    params = SamplingParams(max_new_tokens=6, logprobs=2)
    (result,) = engine.generate(["Run"], params, "serial")
    ids = np.asarray([[*result.prompt_token_ids, *result.token_ids]], np.int32)
    assert lm.special_tokens is not None
    layout = build_layout(ids, lm.special_tokens, lm.config.positions)
    logits = np.asarray(lm.model.apply({"params": lm.params}, ids, layout), np.float64)[0]
    logits = logits[:, : lm.config.vocab_size]
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert result.logprobs is not None and len(result.logprobs) == result.stats.content_tokens > 0
    for place, token in enumerate(result.logprobs, len(result.prompt_token_ids)):
        assert token.token == ids[0, place] and len(token.top) == 2
        assert token.logprob == pytest.approx(expected[place - 1, token.token], abs=1e-3)
    *_, last = engine.submit("Run", params, "serial")
    assert last.result is not None and last.result.logprobs == result.logprobs
    assert engine.generate(["Run"], replace(params, logprobs=None), "serial")[0].logprobs is None


def test_iterating_streams(engine: Engine) -> None:
    """Check that events come while the answer grows, without any option."""
    script = [engine.lm.codec.text.encode("a" * 40)]
    handle = engine.submit("Run", SamplingParams(max_new_tokens=len(script[0]), script=script), "serial")
    ended = [handle.result is not None for event in handle if event.kind == "token"]
    assert len(ended) >= 10 and not any(ended[:-1])


@pytest.mark.parametrize(
    ("dtype", "stored", "backend", "expected"),
    [
        ("auto", "bfloat16", "cpu", "float32"), ("auto", "bfloat16", "gpu", "bfloat16"),
        ("auto", "float16", "tpu", "bfloat16"), ("auto", "float32", "gpu", "float32"),
        ("auto", None, "gpu", "bfloat16"),
        (jnp.bfloat16, "float32", "cpu", "bfloat16"), (np.float32, "bfloat16", "gpu", "float32"),
        (np.dtype("float32"), None, "cpu", "float32"), ("bfloat16", None, "cpu", "bfloat16"),
    ],
)  # fmt: skip
def test_dtypes(dtype: Any, stored: str | None, backend: str, expected: str) -> None:
    for field in ("dtype", "torch_dtype"):
        assert dtype_name(dtype, {} if stored is None else {field: stored}, backend) == expected


def test_models_take_dtypes_and_are_one_line() -> None:
    lm = load_model("demo", jnp.bfloat16)
    assert lm.config.dtype == "bfloat16" and jax.tree.leaves(lm.params)[0].dtype == jnp.bfloat16
    assert repr(lm).startswith("LanguageModel(") and "bfloat16" in repr(lm) and len(repr(lm)) < 120
    for dtype, got in ((jnp.float16, "got 'float16'"), ("brain", "got 'brain'")):
        with pytest.raises(CheckpointError, match=f"dtype: expected float32, bfloat16 or auto, {got}"):
            load_model("demo", dtype)
