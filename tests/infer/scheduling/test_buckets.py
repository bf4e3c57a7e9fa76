"""Selection of the program of a step: it holds the due tokens, is compiled by warm-up, and runs at least one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aspd_jax import SpecialTokens
from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import next_power, powers
from aspd_jax.tokens import TitleForm
from infer.decode.decode_step import StepSummary
from infer.decode.inputs import Widths, max_lanes, rows_of_step, share_tokens, widest
from infer.decode.state import FORK, MERGE, PARALLEL, PROMPT, RUNNING, SERIAL, STOP, EngineConfig
from infer.scheduling.buckets import MAX_TOKENS, PROMPT_BESIDE, SPACING, Buckets, capacity_for, spaced


def config_for(branches: int, title_tokens: int = 24) -> EngineConfig:
    """Return the configuration of an engine of which only the layout is used."""
    layout: Any = SimpleNamespace(config=SimpleNamespace(positions="sequential", siblings="invisible"))
    form = TitleForm(separator=(7, 8))
    return EngineConfig(layout, SpecialTokens(1, 2, 3, 4, 5, 6), form, (0,), (), branches, title_tokens)


def buckets_for(rows: int, capacity: int, config: EngineConfig, free: int = 1) -> Buckets:
    return Buckets(config, rows, capacity, widest(config), free)


class Row(NamedTuple):
    """A row of the cache: phase of its sequence, due tokens and lanes, and slots in use."""

    phase: int
    tokens: int
    lanes: int
    length: int


class Step(NamedTuple):
    """The programs of an engine, and its rows before a step."""

    buckets: Buckets
    rows: list[Row]

    @property
    def summary(self) -> StepSummary:
        phase, tokens, lanes, length = np.asarray(self.rows, np.int32).T
        none = np.zeros_like(phase)
        finish = np.where(tokens > 0, RUNNING, STOP)
        fields = dict.fromkeys(StepSummary._fields, none)
        needed = {"tokens": tokens, "lanes": lanes, "phase": phase, "finish": finish, "length": length}
        return StepSummary(**fields | needed)  # type: ignore[arg-type]

    @property
    def answers(self) -> list[int]:
        """Return the due tokens of each answer."""
        return [row.tokens for row in self.rows if row.phase != PROMPT]

    def fed(self, bucket: Bucket) -> list[int]:
        """Return the tokens that each row feeds in a step of this size, as the device shares them."""
        summary, config = self.summary, self.buckets.config
        state: Any = SimpleNamespace(
            sequence=SimpleNamespace(
                cursor=SimpleNamespace(phase=jnp.asarray(summary.phase), arrival=jnp.arange(len(self.rows)))
            ),
            cache=SimpleNamespace(length=jnp.asarray(summary.length)),
        )
        need, lanes = Widths(*map(jnp.asarray, summary[:2])), max_lanes(config, len(self.rows), bucket)
        selected = rows_of_step(need.tokens, state.sequence.cursor.phase == PROMPT, bucket)
        shared: list[int] = share_tokens(state, need, selected, bucket, lanes).tolist()
        return shared


@st.composite
def steps(draw: st.DrawFn, prompts: bool = True, forks: bool = True) -> Step:
    """Draw rows that feed one token, tokens of branches, a fork or a prompt; at least one feeds something."""
    config = config_for(draw(st.integers(2, 20)), draw(st.integers(1, 24)))
    count, limit = draw(st.integers(1, 40)), config.max_branches
    capacity = max(capacity_for(widest(config)), draw(st.sampled_from([128, 512, 640, 2048, 4096])))

    def row() -> Row:
        kinds = ["rest", "serial", "branches", *["fork", "merge"] * forks, *["prompt"] * prompts]
        kind, lanes = draw(st.sampled_from(kinds)), draw(st.integers(2, limit))
        if kind == "rest":
            return Row(SERIAL, 0, 0, draw(st.integers(0, capacity)))
        most = draw(st.sampled_from([3, 100, capacity]))
        phase, tokens = {
            "serial": (SERIAL, 1),
            "branches": (PARALLEL, draw(st.integers(1, lanes))),
            "fork": (FORK, draw(st.integers(1 + 4 * lanes, 1 + (config.max_title_tokens + 3) * lanes))),
            "merge": (MERGE, lanes + 1),
            "prompt": (PROMPT, draw(st.integers(1, min(most, capacity)))),
        }[kind]
        lanes = {SERIAL: 1, PARALLEL: tokens, FORK: lanes, MERGE: 1, PROMPT: 1}[phase]
        return Row(phase, tokens, lanes, draw(st.integers(0, capacity - tokens)))

    rows = [row() for _ in range(count)]
    if not any(each.tokens for each in rows):
        rows[draw(st.integers(0, count - 1))] = Row(SERIAL, 1, 1, 5)
    return Step(buckets_for(count, capacity, config, draw(st.sampled_from([1, 16]))), rows)


ALL_FORK = Step(buckets_for(32, 2048, config_for(16)), [Row(FORK, 433, 16, 900)] * 32)
A_PROMPT_BESIDE_FORKS = Step(
    buckets_for(8, 2048, config_for(16)), [Row(PROMPT, 700, 1, 0)] + [Row(FORK, 120, 16, 900)] * 7
)


@given(steps())
@example(ALL_FORK).via("more than the largest program holds")
@example(A_PROMPT_BESIDE_FORKS).via("prompts come after answers")
def test_what_is_chosen_holds_what_is_due(drawn: Step) -> None:
    bucket, _, _ = drawn.buckets.select(drawn.summary, True)
    assert bucket in drawn.buckets.buckets
    due = [number for number, row in enumerate(drawn.rows) if row.tokens]
    assert bucket.rows > max(due) or (bucket.rows == 1 and len(due) == 1)
    assert bucket.max_per_row >= max(drawn.answers, default=0)
    for row in drawn.rows:
        if row.tokens:
            assert bucket.slots >= row.length + (1 if row.phase == PROMPT else row.tokens)
    if bucket.tokens < max(of.tokens for of in drawn.buckets.buckets):
        any_prompt = any(row.phase == PROMPT for row in drawn.rows)
        assert bucket.tokens >= sum(drawn.answers) + any_prompt
        lanes = sum(row.lanes for row in drawn.rows)
        assert max_lanes(drawn.buckets.config, len(drawn.rows), bucket) >= lanes


@given(steps())
@example(ALL_FORK).via("more than the largest program holds")
def test_at_least_one_step_runs(drawn: Step) -> None:
    """Check that the loop on the device (`decode_step.run`) goes on before its first step."""
    bucket, smaller, larger = drawn.buckets.select(drawn.summary, True)
    assert sum(row.tokens for row in drawn.rows) > smaller
    assert sum(drawn.answers) <= larger
    due = [row for row in drawn.rows if row.tokens]
    assert max(row.length + (1 if row.phase == PROMPT else row.tokens) for row in due) <= bucket.slots


def test_where_width_is_free_narrow_steps_stay_in_one_program() -> None:
    """Check known text of 8 tokens; negative control: on CPU, a narrow program takes it, and is left for one token."""
    config = config_for(16)
    free, narrow = (Step(buckets_for(4, 512, config, width), [Row(PROMPT, 8, 1, 90)]) for width in (16, 1))
    assert sorted({bucket.tokens for bucket in free.buckets.buckets if bucket.rows == 1}) == [1, 16, 64, 128, 512]
    for step, size, smaller in ((free, 16, -1), (narrow, 8, 4)):
        bucket, least, _ = step.buckets.select(step.summary, True)
        assert (bucket.tokens, least) == (size, smaller)


@pytest.mark.further
@given(steps())
@example(ALL_FORK).via("more than the largest program holds")
@example(A_PROMPT_BESIDE_FORKS).via("prompts come after answers")
def test_what_is_due_is_fed(drawn: Step) -> None:
    """All answers where a program has room for them, but one of those that feed more than the others may; prompts in
    pieces, but never nothing; somebody in any case.
    """
    bucket, _, _ = drawn.buckets.select(drawn.summary, True)
    fed = drawn.fed(bucket)
    smaller = drawn.fed(bucket._replace(per_row=max(1, bucket.per_row // 4), tokens=max(1, bucket.tokens // 4)))
    assert 0 < sum(fed) <= bucket.tokens and max(fed) <= bucket.max_per_row
    assert sum(size > bucket.per_row for size in fed) <= 1
    lanes = 0
    for row, size in zip(drawn.rows, fed, strict=True):
        assert size <= row.tokens and (size == 0 or row.length + size <= bucket.slots)
        if row.phase != PROMPT:
            assert size in (0, row.tokens), "answers are fed whole, or not at all"
            lanes += row.lanes if size else 0
        else:
            lanes += size > 0
    assert lanes <= max_lanes(drawn.buckets.config, len(drawn.rows), bucket)
    pairs = list(zip(drawn.rows, fed, strict=True))
    if bucket.tokens < max(of.tokens for of in drawn.buckets.buckets):
        answers = [pair for pair in pairs if pair[0].phase != PROMPT]
        late = [row.tokens for row, size in answers if size < row.tokens]
        assert all(tokens > bucket.per_row for tokens in late)
        assert not late or any(size > bucket.per_row for _, size in answers), "another was first"
        of_prompts = [size for row, size in pairs if row.phase == PROMPT]
        assert sum(of_prompts) > 0 or not of_prompts
    for row, size in zip(drawn.rows, smaller, strict=True):
        assert row.phase == PROMPT or size in (0, row.tokens), "in a program that is too small, too"


@pytest.mark.further
@given(steps())
@example(A_PROMPT_BESIDE_FORKS).via("the prompt is fed alone")
def test_a_long_prompt_goes_first_without_streams(drawn: Step) -> None:
    """Check the first prompt of `PROMPT_BESIDE` tokens or more, if no short one precedes it; else nothing changes."""
    bucket, smaller, larger = drawn.buckets.select(drawn.summary, False)
    left = [(row.tokens, number) for number, row in enumerate(drawn.rows) if row.phase == PROMPT and row.tokens]
    tokens, first = left[0] if left else (0, 0)
    if tokens < PROMPT_BESIDE:
        assert (bucket, smaller, larger) == drawn.buckets.select(drawn.summary, True)
        return
    assert bucket in drawn.buckets.buckets and bucket.rows == 1 and smaller < tokens
    fed = drawn.fed(bucket)
    assert 0 < fed[first] == sum(fed) == min(tokens, bucket.tokens)


@given(steps(), st.booleans())
@example(ALL_FORK, True).via("more than the largest program holds")
def test_the_smallest_program_is_chosen(drawn: Step, streamed: bool) -> None:
    """Check that every smaller program has too few rows, tokens, slots or lanes."""
    buckets, summary = drawn.buckets, drawn.summary
    bucket, _, _ = buckets.select(summary, streamed)
    need = buckets.need(summary, streamed)
    assert need.tokens >= sum(drawn.answers) or need.rows == 1
    for other in buckets.buckets:
        if (other.tokens, other.slots) < (bucket.tokens, bucket.slots) and (
            other.tokens < bucket.tokens or other[:3] + other[4:] == bucket[:3] + bucket[4:]
        ):
            assert (
                (other.rows < need.rows if need.rows > 1 else other.rows > 1)
                or other.tokens < need.tokens
                or other.max_per_row < need.per_row
                or other.slots < need.slots
                or max_lanes(buckets.config, buckets.rows, other) < need.lanes
            )


@given(steps(prompts=False, forks=False))
def test_branches_get_a_close_fit(drawn: Step) -> None:
    """Check that a program has at most `SPACING` times the due tokens, or twice the rows or branches."""
    bucket, smaller, _ = drawn.buckets.select(drawn.summary, True)
    total, config = sum(drawn.answers), drawn.buckets.config
    assert bucket.tokens <= SPACING * max(total, next_power(bucket.rows), next_power(config.max_branches))
    below = {of.tokens for of in drawn.buckets.buckets if of.rows == bucket.rows and of.tokens < bucket.tokens}
    assert smaller < total and smaller <= max(below, default=-1), "a step runs, in the selected program"
    left_at = min(total - 1, max(below, default=-1)) if bucket.tokens > drawn.buckets.free else -1
    assert smaller == left_at, "and it is left as soon as a smaller one is enough, where that is cheaper"


def test_a_fork_is_left_for_a_program_of_its_branches() -> None:
    """Check that 17 tokens of heads select a program for 64 tokens, and then 4 branches one for 4."""
    buckets = buckets_for(1, 1024, config_for(4))
    bucket, smaller, _ = buckets.select(Step(buckets, [Row(SERIAL, 17, 4, 100)]).summary, True)
    assert bucket.tokens == 64 and smaller >= 4
    assert buckets.select(Step(buckets, [Row(SERIAL, 70, 4, 100)]).summary, True)[0].tokens == 128
    assert buckets.select(Step(buckets, [Row(SERIAL, 4, 4, 100)]).summary, True)[0].tokens == 4


@pytest.mark.parametrize(("branches", "tokens"), [(2, 2), (3, 4), (4, 4)])
def test_few_branches_have_a_program_of_their_own(branches: int, tokens: int) -> None:
    buckets = buckets_for(1, 128, config_for(branches))
    assert buckets.select(Step(buckets, [Row(PARALLEL, branches, branches, 0)]).summary, True)[0].tokens == tokens


@pytest.mark.parametrize(
    ("rows", "capacity", "count"), [(1, 2048, 14), (8, 2048, 26), (32, 2048, 28), (8, 32768, 52), (32, 32768, 56)]
)
def test_there_are_few_programs(rows: int, capacity: int, count: int) -> None:
    buckets = buckets_for(rows, capacity, config_for(16)).buckets
    assert len(set(buckets)) == len(buckets) == count
    assert max(bucket.rows for bucket in buckets) == rows and max(bucket.tokens for bucket in buckets) == MAX_TOKENS


def test_slots_are_spaced() -> None:
    assert spaced(512, 128) == [128] and spaced(512, 640) == [640] and spaced(512, 1024) == [512, 1024]
    assert spaced(512, 2176) == [512, 2176] and spaced(512, 32768) == [512, 2048, 8192, 32768]


def test_a_serial_pass_computes_nothing_beside() -> None:
    for rows in (1, 4, 8, 32):
        buckets = buckets_for(rows, 2048, config_for(16))
        drawn = Step(buckets, [Row(SERIAL, 1, 1, 100)] * rows)
        assert buckets.select(drawn.summary, True)[0] == Bucket(rows, rows, 1, 512)
    for place in (0, 5, 31):
        rows = [Row(SERIAL, 0, 0, 2000)] * 32
        rows[place] = Row(SERIAL, 1, 1, 100)
        assert buckets.select(Step(buckets, rows).summary, True)[0] == Bucket(1, 1, 1, 512), "no other row is read"


def test_a_prompt_alone_goes_in_passes_that_are_half_full() -> None:
    buckets = buckets_for(8, 4096, config_for(16))
    for left in range(1, 4000):
        rows = [Row(SERIAL, 0, 0, 0)] * 7
        rows.insert(left % 8, Row(PROMPT, left, 1, 0))
        bucket, smaller, _ = buckets.select(Step(buckets, rows).summary, True)
        piece = min(left, bucket.tokens)
        assert bucket.rows == 1 and bucket.tokens == bucket.per_row and 2 * piece >= bucket.tokens
        assert bucket.tokens <= PROMPT_BESIDE or piece == bucket.tokens, "padding costs as much time as tokens"
        assert piece == left or smaller < left, "else the loop would end at once, and choose the same again"
    assert bucket.tokens == MAX_TOKENS
    assert [buckets_for(8, 4096, config_for(16), free).prefill_chunk(300) for free in (1, 16)] == [128, 512]


def test_a_prompt_beside_answers_holds_them_up_little() -> None:
    buckets = buckets_for(8, 4096, config_for(16))
    beside = Step(buckets, [Row(SERIAL, 1, 1, 100)] * 7 + [Row(PROMPT, 3000, 1, 0)])
    bucket, _, _ = buckets.select(beside.summary, True)
    assert (bucket.tokens, bucket.per_row, bucket.longest) == (PROMPT_BESIDE, 16, PROMPT_BESIDE)
    prompts = Step(buckets, [Row(PROMPT, 3000, 1, 0)] * 8)
    assert buckets.select(prompts.summary, True)[0].tokens == MAX_TOKENS, "no answer waits for the next token"


@pytest.mark.parametrize(("count", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (512, 512), (513, 1024)])
def test_powers_of_two(count: int, power: int) -> None:
    assert next_power(count) == power


def test_powers_from_one_size_to_another() -> None:
    assert powers(1, 1) == [1] and powers(3, 5) == [4, 8] and powers(64, 512) == [64, 128, 256, 512]
    assert capacity_for(1) == 128 and capacity_for(129) == 256
