from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import aspd
import aspd_jax
from aspd_jax import LanguageModel, load_model
from aspd_jax.errors import RequestError
from aspd_jax.language_model import as_int8
from aspd_jax.shapes import SHAPES, benchmark_model
from infer.bench import decoding
from infer.bench import step_times as times
from infer.bench.decoding import answer_table, answer_times
from infer.bench.step_times import copy_bandwidth, logit_error, measure_steps, step_table
from tests.conftest import tiny_config, write_checkpoint

pytestmark = pytest.mark.further


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    shape = replace(SHAPES["27m"], hidden_size=64, feed_forward=64, layers=1, vocab_size=2048)
    monkeypatch.setitem(SHAPES, "tiny", shape)
    monkeypatch.setattr(times, "COPY_BYTES", 1 << 20)
    return benchmark_model("tiny", "float32")


def test_it_times_the_widths_it_says(tiny: LanguageModel) -> None:
    """Check the figures; `measure_steps` itself raises when a width changed during a run."""
    results = measure_steps(tiny, [1, 4], context=16, repeats=3, steps=4)
    assert [result.width for result in results] == [1, 4]
    for result in results:
        assert 0 < result.fastest <= result.median <= result.slowest
    weights = 4 * (64 * (8 + 2 + 2 + 8) * 64 + 3 * 64 * 64 + 3 * 64 + 64 * 2048)
    cache = 4 * 2 * 128 * 2 * 64
    assert results[0].bandwidth * results[0].median / 1000 == pytest.approx(weights + cache, rel=1e-6)
    (part,) = measure_steps(tiny, [1], context=300, repeats=1, steps=4)
    assert part.bandwidth * part.median / 1000 == pytest.approx(weights + 4 * cache, rel=1e-6)
    assert measure_steps(tiny, [], context=16) == []
    text = step_table(results, copy_bandwidth(2))
    assert "| 1 | " in text and "| 1.00 |" in text and "| 4 | " in text


def test_it_times_the_answers_it_says(tiny: LanguageModel) -> None:
    """Tokens and steps by their definitions (protocol, section 8): 3 branches of 10 tokens, 2 requests at a time."""
    adaptive, serial = answer_times(tiny, branches=3, length=10, context=16, batch=2, repeats=2)
    head, tags = 1 + 2 + 1, 3 * 4 + 1
    content = 32 + 3 * (10 - head - 1)
    assert (adaptive.name, serial.name) == ("adaptive", "serial")
    assert adaptive.content == serial.content == content
    assert adaptive.raw == 32 + tags + 3 * 10 + 1 + 1 and serial.raw == content + 1
    path = 32 + tags + (10 - head) + 1
    assert adaptive.steps == path - 1 and serial.steps == content
    assert adaptive.ideal == pytest.approx(content / path) and serial.ideal == pytest.approx(content / (content + 1))
    for result in (adaptive, serial):
        assert 0 < result.first_token < result.latency <= result.slowest
        assert 0 < result.fastest <= result.seconds <= result.slowest
    text = answer_table([adaptive, serial])
    assert f"| 2 | 3 branches of 10 | {content} | {path - 1} |" in text
    assert f"| {serial.seconds / adaptive.seconds:.2f}x |" in text
    with pytest.raises(RequestError, match="2 branches of at least 6 tokens, got 3 of 5"):
        answer_times(tiny, branches=3, length=5, context=16)


def test_the_command_prints_writes_and_draws(tiny: LanguageModel, capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["bench", "decode", "--shape", "tiny", "--widths", "1", "4", "--answers", "3x10", "--repeats", "1"]
    arguments += ["--context", "16", "--batch", "2", "--json", str(out)]
    assert aspd.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("3 branches of 10") == 1 and "peak memory" in printed
    record = json.loads(out.read_text())
    assert [run["context"] for run in record["runs"]] == [16]
    assert [p["width"] for p in record["runs"][0]["steps"]] == [1, 4]


def test_a_model_without_structure_tokens_has_no_scripted_answers(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Refused before anything is measured where they are asked for, and otherwise left out."""
    demo = load_model("demo")
    assert demo.special_tokens is not None
    unused = tuple((token, token + 1) for token in demo.special_tokens.ids)
    monkeypatch.setattr(
        aspd_jax, "load_model", lambda *_, **__: replace(demo, config=replace(demo.config, unused_tokens=unused))
    )
    command = ["bench", "decode", "--model", "plain", "--widths", "--repeats", "1"]
    assert aspd.main([*command, "--answers", "2x10"]) == 2
    out, error = capsys.readouterr()
    assert not out and "--answers: expected a model with structure tokens, got plain without them" in error
    assert aspd.main(command) == 0
    out = capsys.readouterr().out
    assert "peak memory" in out and "Answers" not in out


def test_int8_says_how_far_its_logits_are_off(tiny: LanguageModel, tmp_path: Path, capsys: Any) -> None:
    rounded = as_int8(tiny)
    kernel = rounded.params["layer_0"]["feed_forward"]["down"]["kernel"]
    assert kernel.dtype == np.int8 and rounded.params["head"]["kernel"].dtype == np.float32
    error = logit_error(tiny, rounded, tokens=32)
    assert 1e-4 < error.relative < 0.1 and error.same_likeliest > 0.7
    assert logit_error(tiny, tiny, tokens=32) == (0.0, 1.0), "negative control"
    arguments = ["bench", "decode", "--shape", "tiny", "--widths", "--answers", "--repeats", "1", "--weights", "int8"]
    assert aspd.main(arguments) == 0
    assert "int8: relative error of the logits " in capsys.readouterr().out
    # The same as when a checkpoint is read with int8 kernels.
    folder = write_checkpoint(tmp_path, tiny_config())
    twin, loaded = as_int8(load_model(folder)).params, load_model(folder, weights="int8").params
    jax.tree.map(np.testing.assert_array_equal, twin, loaded)


def test_what_was_measured_is_there_when_a_benchmark_is_ended(
    tiny: LanguageModel, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    timed: list[int] = []

    def ended(lm: LanguageModel, branches: int, *rest: Any) -> Any:
        timed.append(branches)
        if len(timed) == 2:
            raise KeyboardInterrupt
        return answer_times(lm, branches, *rest)

    monkeypatch.setattr(decoding, "answer_times", ended)
    file = tmp_path / "bench.json"
    arguments = ["bench", "decode", "--shape", "tiny", "--repeats", "1", "--context", "16", "--json", str(file)]
    with contextlib.suppress(KeyboardInterrupt):
        aspd.main([*arguments, "--widths", "1", "--answers", "2x8", "3x8"])
    assert timed == [2, 3]
    (run,) = json.loads(file.read_text())["runs"]
    assert [width["width"] for width in run["steps"]] == [1]
    assert [(answer["name"], answer["branches"]) for answer in run["answers"]] == [("adaptive", 2), ("serial", 0)]
    assert "2 branches of 8" in capsys.readouterr().out


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(RequestError, match="--shape: expected one of 27m, 1b, 7b"):
        benchmark_model("70b", "float32")


def test_random_prompts_hold_no_tags() -> None:
    """Of a model whose special tokens are not its last ones."""
    lm = load_model("demo")
    assert lm.special_tokens is not None and max(lm.special_tokens.ids) < lm.config.vocab_size - 100
    assert not {*lm.special_tokens.ids, *lm.end_ids} & set(decoding.random_prompt(lm, 10_000))
