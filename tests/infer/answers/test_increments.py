"""Answers that are read token by token equal those that the cache holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import infer.scheduling.scheduler
from aspd_jax import LanguageModel
from aspd_jax.model.transformer import Transformer
from aspd_jax.tokens import BlockIds
from infer import Engine, SamplingParams
from infer.answers.answer import RequestOutput, logged_tokens
from infer.control.controller import Controller
from infer.decode.decode_step import TokenLog
from infer.decode.guidance import RowGuidance, SerialRule
from infer.decode.state import PROMPT, RUNNING, STOP
from infer.decode.token_classes import ANY_TEXT, END
from infer.request import Request
from tests.conftest import patched
from tests.helpers.cached_answers import cached_answer, cached_segments, cached_tokens
from tests.helpers.engine_state import engine_state

KINDS: dict[str, dict[str, Any]] = {
    "names": {"titles": "names"},
    "leads": {"titles": "leads"},
    "drafts": {"titles": "names", "drafts": "lookup", "draft_tokens": 2, "force_drafts": True},
    "leads and drafts": {"titles": "leads", "drafts": "lookup", "draft_tokens": 2, "force_drafts": True},
}


def engine_of(lm: LanguageModel, kind: str) -> Engine:
    options = dict(KINDS[kind])
    config = replace(lm.config, titles=options.pop("titles"))
    own = replace(lm, config=config, model=Transformer(config))
    return Engine(own, max_length=512, max_batch=4, max_branches=4, max_title_tokens=4, **options)


def requests(lm: LanguageModel) -> Iterator[SamplingParams]:
    """Yield requests with budgets, stop strings and schemas; their answers fork often, and some titles repeat."""
    ends = {lm.codec.special.title_end: 100.0, lm.codec.special.branch_end: 60.0}
    biases = ends | dict.fromkeys(lm.codec.text.encode("a"), 90.0)
    hot: dict[str, Any] = {"temperature": 15.0, "max_new_tokens": 120, "fork_bias": 60.0, "logit_bias": biases}
    word = {"type": "string", "maxLength": 6}
    for seed in range(0, 24, 6):
        yield SamplingParams(**hot, seed=seed)
        yield SamplingParams(**hot, seed=seed + 1, max_content_tokens=20 + seed)
        yield SamplingParams(**hot, seed=seed + 2, max_branch_tokens=5)
        yield SamplingParams(**hot | {"max_new_tokens": 40 + seed}, seed=seed + 3)
        yield SamplingParams(**hot, seed=seed + 4, stop=("e", "a b"))
        yield SamplingParams(**hot, seed=seed + 5, json_schema={"type": "object", "properties": {"word": word}})


def compare(own: Engine, params: list[SamplingParams]) -> Counter[str]:
    """Run requests together, a few steps at a time, and compare after each; return what was seen."""
    random, seen = Random(0), Counter[str]()
    handles = [own.submit("Say:", one) for one in params]
    ended: set[int] = set()
    while any(handle.result is None for handle in handles):
        own.step(random.randint(1, 9))
        state = engine_state(own)
        for handle in filter(None, state.rows):
            if not handle.decoding:
                continue
            assert handle.row is not None
            output, cached = handle.output, cached_answer(state.decode, own.config, handle.row)
            for name in ("items", "open_branches", "opening", "end", "size", "content"):
                assert getattr(output, name) == getattr(cached, name), name
            partial = handle.partial()  # a stop string ends it
            if partial.finish_reason is None and not state.read_output(handle).shortened:
                assert partial.token_ids == cached_tokens(state.decode, own.config, handle.row)[0].tolist()
            seen["opening"] += bool(output.opening)
            seen["open block"] += bool(output.open_branches)
            seen["later text"] += any(isinstance(item, BlockIds) for item in output.items[:-1])
        for number, handle in enumerate(handles):
            if handle.result is not None and number not in ended:
                ended.add(number)
                assert handle.row is not None
                cached = cached_answer(state.decode, own.config, handle.row)
                assert cached.finish != RUNNING
                if not handle.request.params.stop:
                    limited = cached.limited(handle.request.params.max_content_tokens)
                    assert handle.result.token_ids == limited.token_ids(own.config)
                seen["ended"] += 1
                seen["discarded"] += handle.result.stats.discarded_tokens > 0
                seen["accepted"] += handle.result.stats.accepted_tokens > 0
    return seen


@pytest.mark.further
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind != "drafts" else pytest.mark.slow) for kind in KINDS]
)
def test_answers_are_those_of_the_cache(lm: LanguageModel, kind: str) -> None:
    """Check tokens, blocks, titles under way and ends of growing and ended answers, with logs of few steps."""
    with patched(MIN_LOG=1, LOG_STEPS=2):
        seen = compare(engine_of(lm, kind), list(requests(lm)))
    assert all(seen[name] > 3 for name in ("opening", "open block", "later text", "ended")), seen
    assert seen["discarded"] and (seen["accepted"] or "drafts" not in kind), seen


@pytest.mark.further
def test_templates_are_those_of_the_cache(lm: LanguageModel) -> None:
    """Check the tokens of templates while they are filled."""
    own, checked = engine_of(lm, "names"), 0
    template = "Name: {a}\nAge: {b}\nSo: {c after a}"
    params = SamplingParams(temperature=1.0, max_new_tokens=200, max_branch_tokens=12, template=template)
    handles = [own.submit("Say:", replace(params, seed=seed)) for seed in (1, 2)]
    while any(handle.result is None for handle in handles):
        own.step(1)
        state = engine_state(own)
        for handle in filter(None, state.rows):
            if handle.decoding:
                assert handle.row is not None
                output = state.read_output(handle)
                tokens = cached_tokens(state.decode, own.config, handle.row)[0].tolist()
                assert output.token_ids(own.config) == tokens and output.size == len(tokens)
                checked += len(tokens) > 0
    assert checked > 8


class RandomDecisions(Controller):
    """Random decisions about an answer without tags: known texts, blocks, and places at which text goes on."""

    def __init__(self, request: Request, *_: Any) -> None:
        self._random, self.seen, self._base = Random(request.seed), Counter[str](), 0

    def start(self) -> RowGuidance:
        return RowGuidance(left={0: 2})

    def read(self, output: RequestOutput) -> RequestOutput:
        return replace(output, items=[])

    def follow(self, output: RequestOutput) -> RowGuidance:
        random, size = self._random, len(output.serial_ids)
        kind = random.choice(["goes on", "text", "fork"] if not output.branch_ids else ["goes on", "close", "text"])
        self.seen[kind] += 1
        if sum(self.seen.values()) > 14:
            return RowGuidance(finish=STOP)
        if not output.branch_ids:
            self._base = output.position + 1 - size
        own = sorted(output.open_branches) if output.branch_ids else [0]
        left = {segment: random.randint(1, 5) for segment in own}
        if kind == "close" and len(own) > 1:
            closed = frozenset(random.sample(own, random.randint(1, len(own) - 1)))
            left = {segment: count for segment, count in left.items() if segment not in closed}
            return RowGuidance(left=left, closed=closed, emptied=closed)
        if kind in ("goes on", "close"):
            return RowGuidance(left=left)
        place = random.randint(max(1, size - 6), size - (not output.branch_ids))  # a pending token is dropped
        text = [random.randrange(100, 200) for _ in range(random.randint(1, 40))]
        if kind == "text":
            rule = SerialRule(ANY_TEXT)
            return RowGuidance(left={0: random.randint(1, 5)}, serial=rule, resume_at=self._base + place, text=text)
        heads = {number: text[: random.randint(1, 3)] for number in range(1, random.randint(3, 5))}
        return RowGuidance(
            left=dict.fromkeys(heads, random.randint(1, 5)),
            stops=dict.fromkeys(heads, 1 << END),
            known_tokens=heads,
            counted=False,
            branches=len(heads),
            resume_at=self._base + place,
        )


@pytest.mark.further
def test_answers_without_tags_are_those_of_the_cache(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check tokens after random decisions that hide tokens, drop blocks and feed texts, also while these are fed."""
    monkeypatch.setattr(infer.scheduling.scheduler, "Lists", RandomDecisions)
    monkeypatch.setattr(Engine, "_writes_lists", lambda *_: True)
    random, seen, own = Random(0), Counter[str](), engine_of(lm, "names")
    params = SamplingParams(temperature=1.0, max_new_tokens=400, logit_bias={lm.end_ids[0]: -100.0})
    handles = [own.submit("Say:", replace(params, seed=seed)) for seed in range(12)]
    while any(handle.result is None for handle in handles):
        own.step(random.randint(1, 4))
        state = engine_state(own)
        for handle in filter(None, state.rows):
            if not handle.decoding:
                continue
            assert handle.row is not None
            output, segments = handle.output, cached_segments(state.decode, own.config, handle.row)
            assert (output.serial_ids, list(output.branch_ids)) == segments
            assert output.size == len(output.serial_ids) + sum(map(len, output.branch_ids))
            seen["feeding"] += int(state.decode.sequence.cursor.phase[handle.row]) == PROMPT
            seen["open block"] += bool(output.branch_ids)
    for handle in handles:
        assert isinstance(handle.controller, RandomDecisions)
        seen.update(handle.controller.seen)
    assert all(seen[name] > 3 for name in ("feeding", "open block", "text", "fork", "close")), seen


@pytest.mark.further
def test_a_lost_token_is_noticed(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the comparison fails if the host skips a token (negative control)."""

    def lossy(log: TokenLog) -> Iterator[tuple[int, int, list[int]]]:
        for row, segment, tokens in logged_tokens(log):
            yield row, segment, tokens[1:] if len(tokens) > 2 else tokens

    monkeypatch.setattr(infer.scheduling.scheduler, "logged_tokens", lossy)
    with pytest.raises(AssertionError):
        compare(engine_of(lm, "names"), list(requests(lm))[:4])


def test_a_log_is_grouped_by_segment() -> None:
    """Check the order of segments against a brute-force grouping."""
    random = np.random.default_rng(0)
    for size in (0, 1, 40):
        entries = np.zeros((64, 3), np.int32)
        entries[:size] = random.integers(0, (3, 4, 50), (size, 3))
        found = list(logged_tokens(TokenLog(entries, np.int32(size))))  # type: ignore[arg-type]
        wanted = [
            (row, segment, [int(t) for r, s, t in entries[:size] if (r, s) == (row, segment)])
            for row in range(3)
            for segment in (1, 2, 3, 0)
        ]
        assert found == [one for one in wanted if one[2]]
