"""What must hold for decoding (spec, section 6), each with a negative control."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax import LanguageModel, SpecialTokens, build_layout, load_model
from aspd_jax.errors import RequestError, StructureError
from aspd_jax.model.transformer import Transformer
from aspd_jax.sharding import make_mesh
from infer import Engine, Result, SamplingParams
from infer.decoding import feed_prompts, start_state
from infer.request import Job
from infer.state import width_bucket
from infer.step import next_widths, run
from tests.conftest import GOLDEN, SHARED, tiny_config, write_checkpoint

SEPARATOR = (15, 16)
TEXT = list(range(1, 15))


@pytest.fixture(scope="module")
def engine(bare_lm: LanguageModel) -> Engine:
    return Engine(bare_lm, max_length=512, max_batch=32, max_branches=5, max_title_tokens=3, separator_ids=SEPARATOR)


def linearise(special: SpecialTokens, parts: list, end: int | None = 0) -> list[int]:
    """Serial stretches (lists) and blocks (lists of (title, text)), as the protocol writes them down."""
    ids: list[int] = []
    for part in parts:
        if part and isinstance(part[0], tuple):
            for title, _ in part:
                ids += [special.title_start, *title, special.title_end]
            ids.append(special.parallel_start)
            for title, text in part:
                ids += [special.branch_start, *title, *SEPARATOR, *text, special.branch_end]
            ids.append(special.parallel_end)
        else:
            ids += part
    return ids + ([end] if end is not None else [])


def critical_path(special: SpecialTokens, parts: list) -> int:
    """Section 8, counted from the structure: end of text included."""
    path = 1
    for part in parts:
        if part and isinstance(part[0], tuple):
            path += sum(len(title) + 2 for title, _ in part) + 1
            path += max(len(text) + 1 for _, text in part)
        else:
            path += len(part)
    return path


text = st.lists(st.sampled_from(TEXT), max_size=5)
title = st.lists(st.sampled_from(TEXT), min_size=1, max_size=3)
block = st.lists(st.tuples(title, text), min_size=2, max_size=5)
parts = st.lists(st.one_of(text, block), min_size=1, max_size=4)
EXAMPLE = [[3, 4], [([5], [6, 7, 8]), ([9, 2], [1]), ([5], [])], [4], [([1], [2]), ([2], [3, 4, 5, 6])], [7, 7]]


def full_pass(lm: LanguageModel, special: SpecialTokens, prompt: list[int], answer: list[int]) -> np.ndarray:
    tokens = np.array([prompt + answer])
    layout = build_layout(tokens, special, lm.config.positions)
    return np.asarray(lm.model.apply({"params": lm.params}, tokens, layout))[0, len(prompt) :]


@settings(max_examples=15)
@given(parts=parts, prompt=st.lists(st.sampled_from(TEXT), min_size=1, max_size=5))
def test_stepwise_logits_equal_the_full_pass(engine: Engine, parts: list, prompt: list[int]) -> None:
    special = engine.protocol.special
    answer = linearise(special, parts)
    trace = engine.replay(prompt, answer)
    np.testing.assert_allclose(trace.logits, full_pass(engine.lm, special, prompt, answer), atol=1e-4)
    assert trace.passes == critical_path(special, parts) - 1


@pytest.mark.parametrize("scheme", ["sequential", "max", "predict"])
def test_stepwise_logits_for_every_position_scheme(bare_lm: LanguageModel, scheme: Any) -> None:
    config = replace(bare_lm.config, positions=scheme)
    lm = replace(bare_lm, config=config, model=Transformer(config))
    own = Engine(lm, max_length=512, separator_ids=SEPARATOR)
    answer = linearise(own.protocol.special, EXAMPLE)
    logits = own.replay([1, 2], answer).logits
    np.testing.assert_allclose(logits, full_pass(lm, own.protocol.special, [1, 2], answer), atol=1e-4)
    if scheme != "sequential":  # negative control: trained with one scheme, decoded with another
        assert np.abs(logits - full_pass(bare_lm, own.protocol.special, [1, 2], answer)).max() > 1e-2


def test_shared_siblings_break_the_equality(bare_lm: LanguageModel) -> None:
    """Negative control: with rule 3 dropped, branches decoded side by side see what training never showed them."""
    config = replace(bare_lm.config, siblings="shared")
    lm = replace(bare_lm, config=config, model=Transformer(config))
    own = Engine(lm, max_length=512, separator_ids=SEPARATOR)
    answer = linearise(own.protocol.special, EXAMPLE)
    error = np.abs(own.replay([1], answer).logits - full_pass(lm, own.protocol.special, [1], answer)).max(axis=1)
    assert error.max() > 1e-2


def test_every_token_is_fed_once(engine: Engine) -> None:
    answer = linearise(engine.protocol.special, EXAMPLE)
    trace = engine.replay([1], answer)
    assert sum(trace.widths) == len(answer) - 1, "all but the last, which no pass has to feed"
    fork = 1 + (1 + 1 + 2) + (1 + 2 + 2) + (1 + 1 + 2)
    assert fork in trace.widths, "`<|para|>` and all heads go in one pass"
    assert 3 + 1 in trace.widths, "all closing tags and `<|/para|>` go in one pass"


@pytest.mark.parametrize("file", sorted((GOLDEN / "engine").glob("*.npz")), ids=lambda file: file.stem)
def test_authors_engine(file: Path) -> None:
    if not (SHARED / "golden" / "tiny_qwen2").exists():
        pytest.skip("no shared/ beside the project")
    lm = load_model(SHARED / "golden" / "tiny_qwen2")
    lm.special_tokens = SpecialTokens(594, 595, 596, 597, 592, 593)
    vector = np.load(file)
    tokens, prompt, fed = vector["tokens"].tolist(), int(vector["prompt_length"]), vector["fed"]
    trace = Engine(lm).replay(tokens[:prompt], tokens[prompt:])
    np.testing.assert_allclose(trace.logits[fed[prompt:]], vector["logits"][prompt:][fed[prompt:]], atol=1e-4)
    np.testing.assert_allclose(full_pass(lm, lm.special_tokens, [], tokens)[fed], vector["logits"][fed], atol=1e-4)


def branch_rows(special: SpecialTokens, answer: list[int], order: list[int]) -> list[np.ndarray]:
    """Places of each branch's tokens in an answer with one block, listed by original branch number."""
    starts = [i for i, token in enumerate(answer) if token == special.branch_start]
    ends = [i for i, token in enumerate(answer) if token == special.branch_end]
    rows = [np.arange(a, b + 1) for a, b in zip(starts, ends, strict=True)]
    return [rows[order.index(number)] for number in range(len(order))]


@pytest.mark.parametrize("scheme", ["sequential", "max"])
def test_permuting_branches_permutes_their_logits(bare_lm: LanguageModel, scheme: Any) -> None:
    config = replace(bare_lm.config, positions=scheme)
    lm = replace(bare_lm, config=config, model=Transformer(config))
    own = Engine(lm, max_length=512, separator_ids=SEPARATOR)
    special = own.protocol.special
    block = [([5], [6, 7, 8]), ([5], [1]), ([5], [9, 9])]  # equal titles: the serial text before does not change
    logits, places = {}, {}
    for order in ([0, 1, 2], [2, 0, 1]):
        answer = linearise(special, [[3], [block[i] for i in order], [4, 4]])
        logits[order[0]] = own.replay([1, 2], answer).logits
        places[order[0]] = branch_rows(special, answer, order)
    for a, b in zip(places[0], places[2], strict=True):
        np.testing.assert_allclose(logits[0][a], logits[2][b], atol=1e-4)
    np.testing.assert_allclose(logits[0][-3:], logits[2][-3:], atol=1e-4)
    assert np.abs(logits[0] - logits[2]).max() > 1e-2, "negative control: unpermuted, they differ"


def test_a_branch_is_the_same_without_its_siblings(engine: Engine) -> None:
    special, block = engine.protocol.special, [([5], [6, 7, 8]), ([9], [1]), ([2], [9, 9])]
    answer = linearise(special, [[3], block], end=None)
    logits = engine.replay([1, 2], answer).logits
    head = answer[: answer.index(special.branch_start)]
    for number, rows in enumerate(branch_rows(special, answer, [0, 1, 2])):
        alone = full_pass(engine.lm, special, [1, 2], head + [answer[i] for i in rows])[len(head) :]
        np.testing.assert_allclose(logits[rows], alone, atol=1e-4)
        if number:  # negative control: as plain text behind its sibling it is another
            config = replace(engine.lm.config, siblings="shared")
            shared = replace(engine.lm, config=config, model=Transformer(config))
            assert np.abs(logits[rows] - full_pass(shared, special, [1, 2], answer)[rows]).max() > 1e-2


def well_formed(engine: Engine, ids: list[int]) -> bool:
    """An answer against a regular expression over the tags, and heads against titles: independent of the project."""
    special = engine.protocol.special
    names = dict(zip(special.ids, "tTpPbB", strict=True)) | dict.fromkeys(engine.protocol.end, "$")
    letters = "".join(names.get(token, ".") for token in ids)
    if not re.fullmatch(r"\.*((t\.+T){2,}p(b\.*B){2,}P\.*)*\$?", letters):
        return False
    for found in re.finditer(r"(t\.+T)+p(b\.*B)+P", letters):
        block = ids[found.start() : found.end()]
        shape = letters[found.start() : found.end()]
        titles = [block[m.start() + 1 : m.end() - 1] for m in re.finditer(r"t\.+T", shape)]
        branches = [block[m.start() + 1 : m.end() - 1] for m in re.finditer(r"b\.*B", shape)]
        if len(titles) != len(branches) or len(titles) > engine.protocol.max_branches:
            return False
        for own, branch in zip(titles, branches, strict=True):
            head = [*own, *engine.protocol.separator]
            if branch[: len(head)] != head or len(own) > engine.protocol.max_title_tokens:
                return False
    return True


def path_of(engine: Engine, ids: list[int]) -> int:
    """The critical path, from the tokens of an answer alone."""
    special, path, blocks, inside, longest = engine.protocol.special, 0, 0, 0, 0
    titles: list[int] = []
    size = 0
    for token in ids:
        if token == special.branch_start:
            inside, size = 1, 0
        elif token == special.branch_end:
            head = titles.pop(0) + len(engine.protocol.separator)
            longest, inside = max(longest, size - head + 1), 0
        elif token == special.parallel_end:
            path, longest, blocks = path + longest, 0, blocks + 1
        elif inside:
            size += 1
        else:
            path += 1
            if token == special.title_start:
                titles.append(0)
            elif titles and token != special.title_end and token != special.parallel_start:
                titles[-1] += 1
    return path


def test_a_thousand_random_answers_are_well_formed_and_in_budget(engine: Engine) -> None:
    random = np.random.default_rng(0)
    wave, blocks, reasons = 32, 0, set()
    for seed in range(32):
        budgets = [int(b) for b in random.integers(1, 90, wave)]
        params = [
            SamplingParams(
                temperature=float(random.choice([1.0, 3.0, 100.0])),
                max_new_tokens=budget,
                max_branch_tokens=int(random.choice([1, 2, 6, 50])),
                seed=seed * wave + number,
            )
            for number, budget in enumerate(budgets)
        ]
        for budget, asked, result in zip(budgets, params, engine.generate([[1, 2, 3]] * wave, params), strict=True):
            ids = result.token_ids
            assert well_formed(engine, ids), ids
            assert len(ids) <= budget
            assert (result.finish_reason == "stop") == (ids[-1] == 0)
            assert result.stats.generated_tokens == len(ids)
            assert result.stats.critical_path == path_of(engine, ids)
            assert result.stats.passes == result.stats.critical_path - 1
            blocks += result.stats.blocks
            reasons.add(result.finish_reason)
            for branch in re.findall(r"b\.*B", ids_as_letters(engine, ids)):
                assert len(branch) <= 2 + 3 + 2 + asked.max_branch_tokens - 1
    assert blocks > 300
    assert reasons == {"stop", "length"}


def ids_as_letters(engine: Engine, ids: list[int]) -> str:
    names = dict(zip(engine.protocol.special.ids, "tTpPbB", strict=True))
    return "".join(names.get(token, ".") for token in ids)


def test_without_the_grammar_answers_are_malformed(engine: Engine, monkeypatch: Any) -> None:
    """Negative control of the fuzz test."""
    import infer.step

    jax.clear_caches()
    monkeypatch.setattr(infer.step, "allowed", lambda state, protocol, feed: np.ones((*feed.lane.shape, 9), bool))
    params = [SamplingParams(temperature=100.0, max_new_tokens=60, seed=seed) for seed in range(8)]
    try:
        malformed = 0
        for asked in params:
            try:
                malformed += not well_formed(engine, engine.generate([[1]], asked)[0].token_ids)
            except StructureError:
                malformed += 1
    finally:
        jax.clear_caches()
    assert malformed >= 6


def test_serial_mode_never_forks(engine: Engine) -> None:
    params = [SamplingParams(temperature=100.0, max_new_tokens=80, seed=seed) for seed in range(32)]
    serial = engine.generate([[1]] * 32, params, mode="serial")
    assert not any(set(result.token_ids) & set(engine.protocol.special.ids) for result in serial)
    adaptive = engine.generate([[1]] * 32, params, mode="adaptive")
    assert any(result.stats.blocks for result in adaptive), "negative control"


def same(a: Result, b: Result) -> bool:
    return a.token_ids == b.token_ids and a.finish_reason == b.finish_reason and a.stats.passes == b.stats.passes


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    random = np.random.default_rng(5)
    prompts = [random.integers(1, 15, size).tolist() for size in (1, 7, 3, 20, 2, 11, 5)]
    params = [
        SamplingParams(
            temperature=(0.0, 20.0)[number % 3 != 0],
            top_k=(0, 12)[number % 3 == 1],
            top_p=(1.0, 0.9)[number % 3 == 2],
            repetition_penalty=(1.0, 1.3)[number % 4 == 3],
            max_new_tokens=60 + 15 * number,
            seed=number,
        )
        for number in range(len(prompts))
    ]
    return prompts, params, ["adaptive", "adaptive", "serial", "adaptive", "adaptive", "adaptive", "adaptive"]


def test_output_is_the_same_alone_in_a_batch_and_afterwards(engine: Engine) -> None:
    prompts, params, modes = mixed_requests()
    together = engine.generate(prompts, params, modes)
    backwards = engine.generate(prompts[::-1], params[::-1], modes[::-1])[::-1]
    for number, result in enumerate(together):
        alone = engine.generate([prompts[number]], params[number], modes[number])[0]
        assert same(alone, result)
        assert same(alone, backwards[number])
    assert sum(result.stats.blocks for result in together) >= 2
    other = engine.generate([prompts[1]], replace(params[1], seed=99), modes[1])[0]
    assert other.token_ids != together[1].token_ids, "negative control: another seed gives another answer"


def test_output_is_the_same_on_eight_devices(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, tiny_config(vocab_size=24, num_attention_heads=8, num_key_value_heads=8, hidden_size=64), seed=2
    )
    prompts, params, modes = mixed_requests()
    params = [replace(p, temperature=0.0) for p in params]
    results, logits = [], []
    for mesh in (None, make_mesh({"tensor": 8}), make_mesh({"data": 2, "fsdp": 2, "tensor": 2})):
        lm = load_model(folder, mesh=mesh)
        lm.special_tokens = SpecialTokens(17, 18, 19, 20, 21, 22)
        own = Engine(lm, max_length=512, max_batch=8, separator_ids=SEPARATOR)
        results.append(own.generate(prompts, params, modes))
        logits.append(own.replay([1], linearise(own.protocol.special, EXAMPLE)).logits)
    for other, other_logits in zip(results[1:], logits[1:], strict=True):
        assert [r.token_ids for r in other] == [r.token_ids for r in results[0]]
        np.testing.assert_allclose(other_logits, logits[0], atol=1e-3)
    jobs = [Job((1, 2), SamplingParams(), "serial", 10, 0)]
    state = start_state(lm, own.protocol, jobs)
    assert state.cache.layers[0].key.sharding.spec[1] == "tensor", "the cache is split by kv heads"


def test_the_cache_is_never_moved_or_recomputed(engine: Engine) -> None:
    """Every slot keeps its keys and values, bit by bit, from the pass that wrote it to the end."""
    protocol, lm = engine.protocol, engine.lm
    forks = 0
    for seed in range(4):
        job = Job((1, 2, 3), SamplingParams(temperature=100.0), "adaptive", 100, seed)
        state = feed_prompts(lm, protocol, start_state(lm, protocol, [job]), [job.prompt])
        history: list[tuple[int, np.ndarray]] = []
        while (widest := int(np.max(next_widths(state, protocol)))) > 0:
            forks += widest >= 7
            state, _ = run(lm.params, state, 1, protocol, width_bucket(widest))
            history.append((int(state.cache.length[0]), np.asarray(state.cache.layers[-1].key)[0]))
        lengths = [length for length, _ in history]
        assert lengths == sorted(lengths)
        for length, keys in history:
            np.testing.assert_array_equal(keys[:, :length], history[-1][1][:, :length])
            assert not keys[:, length:].any(), "nothing is written ahead"
    assert forks


def test_end_of_text_in_a_branch_is_its_closing_tag(bare_lm: LanguageModel, engine: Engine) -> None:
    """With half of the vocabulary ending the text, branches end by their tag and hold none of it."""
    ends = set(TEXT[1:])
    ending = Engine(replace(bare_lm, end_ids=tuple(ends)), max_length=512, max_batch=16, separator_ids=SEPARATOR)
    params = [SamplingParams(temperature=100.0, max_new_tokens=120, seed=seed) for seed in range(16)]
    contents: dict[Engine, list[set[int]]] = {ending: [], engine: []}
    for own in contents:
        prompt = [1, *linearise(own.protocol.special, [[1]], end=None)]
        for result in own.generate([prompt] * len(params), params):
            letters = ids_as_letters(own, result.token_ids)
            for found in re.finditer(r"b\.*B", letters):
                contents[own].append(set(result.token_ids[found.start() + 1 : found.end() - 1]))
    assert not any(inside & ends for inside in contents[ending])
    assert any(inside & ends for inside in contents[engine]), "negative control: elsewhere they are text"


def test_budgets_and_limits_have_errors_that_name_them(engine: Engine) -> None:
    with pytest.raises(
        RequestError, match=r"request 1: the prompt has 600 tokens.*max_length \(prompt and answer\) is 512"
    ):
        engine.generate([[1], [1] * 600])
    with pytest.raises(RequestError, match="request 0: the prompt is empty"):
        engine.generate([[]])
    with pytest.raises(RequestError, match="token ids must be between 0 and 23"):
        engine.generate([[24]])
    with pytest.raises(RequestError, match="generate takes a list of prompts"):
        engine.generate("hello")
    with pytest.raises(RequestError, match="no tokenizer; pass prompts as token ids"):
        engine.generate(["hello"])
    with pytest.raises(RequestError, match="params has 1 entries for 2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(RequestError, match="prompt and answer have 513 tokens, max_length is 512"):
        engine.replay([1], [1] * 512)
    with pytest.raises(RequestError, match="ends inside a branch"):
        engine.generate([[1, engine.protocol.special.branch_start, 2]])


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"max_new_tokens": 0},
        {"max_branch_tokens": 0},
        {"stop": ("",)},
        {"seed": -1},
    ],
    ids=str,
)
def test_sampling_params_name_the_bad_field(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        SamplingParams(**field)


def test_a_full_cache_ends_with_length(bare_lm: LanguageModel) -> None:
    own = Engine(bare_lm, max_length=40, separator_ids=SEPARATOR)
    results = [
        own.generate([[1] * 10], SamplingParams(temperature=3.0, max_new_tokens=500, seed=s))[0] for s in range(8)
    ]
    cut = [result for result in results if result.finish_reason == "length"]
    assert cut
    assert all(10 + len(result.token_ids) <= 40 for result in cut)
    assert all(result.stats.critical_path == result.stats.passes + 1 for result in results)


def test_stream_ends_with_the_result(lm: LanguageModel) -> None:
    own = Engine(lm, max_length=256)
    params = SamplingParams(temperature=1.0, max_new_tokens=60, seed=4)
    partial = list(own.stream("Run", params, steps=3))
    final = own.generate(["Run"], params)[0]
    assert same(partial[-1], final)
    assert partial[-1].text == final.text
    assert all(result.finish_reason is None for result in partial[:-1])
    lengths = [len(result.token_ids) for result in partial]
    assert lengths == sorted(lengths)
    assert len(lengths) > 5


def test_stop_strings_end_their_stretch(lm: LanguageModel) -> None:
    own = Engine(lm, max_length=512)
    stopped_answers = 0
    for seed in range(8):
        params = SamplingParams(temperature=1.0, max_new_tokens=150, seed=seed)
        free = own.generate(["Run"], params)[0]
        stopped = own.generate(["Run"], replace(params, stop=("e", "1")))[0]
        for item in stopped.structure:
            texts = [item.text] if hasattr(item, "text") else [branch.text for branch in item.branches]
            assert not any("e" in text or "1" in text for text in texts)
        if stopped.finish_reason == "stop" and stopped.token_ids[-1] not in own.protocol.end:
            stopped_answers += 1
            assert free.text.startswith(stopped.text) or stopped.stats.blocks
        assert stopped.stats.passes == stopped.stats.critical_path - 1
    assert stopped_answers > 3


def test_conversation_with_blocks_in_the_prompt(engine: Engine) -> None:
    """A prompt may hold the blocks of an earlier answer; its branches stay hidden from each other."""
    special = engine.protocol.special
    earlier = linearise(special, EXAMPLE, end=None)
    later = linearise(special, [[2], [([7], [8]), ([9], [1, 2])]])
    whole = full_pass(engine.lm, special, [1, *earlier, 3], later)
    np.testing.assert_allclose(engine.replay([1, *earlier, 3], later).logits, whole, atol=1e-4)


def greedy_vector() -> dict[str, Any]:
    return json.loads((GOLDEN / "greedy.json").read_text())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_serial_mode_equals_transformers_generate(name: str, tmp_path: Path) -> None:
    from tests.make_parity import CASES

    lm = load_model(write_checkpoint(tmp_path, CASES[name]))
    vector = greedy_vector()[name]
    own = Engine(lm, max_length=128)
    results = own.generate(vector["prompts"], SamplingParams(max_new_tokens=60), mode="serial")
    assert [result.token_ids for result in results] == vector["answers"]
    assert any(result.finish_reason == "stop" for result in results) or name != "llama"


def test_real_checkpoint_greedy() -> None:
    folder = SHARED / "data" / "checkpoints" / "stories260k"
    if not folder.exists():
        pytest.skip("no shared/ beside the project")
    expected = json.loads((folder / "greedy_expected.json").read_text())["greedy_tokens"]
    lm = load_model(folder)
    result = Engine(lm).generate([""], SamplingParams(max_new_tokens=len(expected) - 1), mode="serial")[0]
    assert result.prompt_token_ids + result.token_ids == expected
