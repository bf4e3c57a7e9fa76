"""Known branches: their log probabilities equal those of a full pass, whatever is beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import infer.scheduling.runner
from aspd_jax import LanguageModel
from aspd_jax.errors import RequestError
from aspd_jax.layout import build_layout
from aspd_jax.model.cache import Bucket
from infer import Engine, SamplingParams
from infer.control.scoring import KnownTokens, score_inputs
from infer.decode.scoring import MAX_READS, score
from infer.request import ScoredBranch
from infer.scheduling.buckets import MAX_TOKENS
from infer.scheduling.step_cost import StepCost
from tests.conftest import SIZES

ATOL = 1e-4


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


def tokens(seed: int, size: int) -> tuple[int, ...]:
    """Tokens that are no tags."""
    return tuple(np.random.default_rng(seed).integers(10, 300, size).tolist())


def branch(seed: int, size: int) -> ScoredBranch:
    """A branch that reads two next tokens at its end, and its own second token behind the first."""
    ids = tokens(seed, size)
    return ScoredBranch(ids, (0, size - 1, size - 1), (ids[min(1, size - 1)], 40 + seed % 7, 50))


def alone(lm: LanguageModel, prompt: Sequence[int], known: ScoredBranch) -> list[float]:
    """The log probabilities of one full pass over the prompt and the branch as serial text."""
    assert lm.special_tokens is not None
    ids = np.asarray([[*prompt, *known.tokens]], np.int32)
    layout = build_layout(ids, lm.special_tokens, lm.config.positions)
    logits = jax.nn.log_softmax(lm.model.apply({"params": lm.params}, ids, layout)[0])  # type: ignore[index]
    pairs = zip(known.places, known.ids, strict=True)
    return [float(logits[len(prompt) + place, token]) for place, token in pairs]


@pytest.mark.further
def test_scores_equal_a_full_pass(engine: Engine) -> None:
    """Check branches of all sizes, in more packs than one; negative control: a branch that follows the others."""
    prompt, known = tokens(0, 50), [branch(seed, 1 + 7 * seed) for seed in range(20)]
    assert sum(len(one.tokens) for one in known) > MAX_TOKENS > max(len(one.tokens) for one in known)
    scores = engine.score(prompt, known)
    for one, read in zip(known, scores, strict=True):
        np.testing.assert_allclose(read, alone(engine.lm, prompt, one), atol=ATOL)
    behind = [*prompt, *known[-2].tokens]
    assert np.abs(np.subtract(scores[-1], alone(engine.lm, behind, known[-1]))).max() > 0.01


@pytest.mark.further
def test_a_branch_does_not_depend_on_the_others(engine: Engine) -> None:
    """Check one branch alone, among 400, in another order, twice, and beside other requests."""
    prompt, one = tokens(1, 40), branch(7, 12)
    (expected,) = engine.score(prompt, [one])
    others = [branch(seed, 3 + seed % 9) for seed in range(399)]
    for number in (0, 200, 399):
        scores = engine.score(prompt, [*others[:number], one, *others[number:]])
        np.testing.assert_allclose(scores[number], expected, atol=ATOL)
    first, *_, last = engine.score(prompt, [one, *others[:5], one])
    np.testing.assert_allclose([first, last], [expected, expected], atol=ATOL)
    params = SamplingParams(temperature=0.0, max_new_tokens=30)
    (text,) = engine.generate([tokens(2, 30)], params, "serial")
    handles = [engine.submit(tokens(2, 30), params, "serial", stream="text")]
    handles += [engine.submit_checked(engine.check_branches(prompt, [*others[:150], one])) for _ in range(2)]
    found = [handle.wait() for handle in handles]
    assert found[0].token_ids == text.token_ids
    for result in found[1:]:
        np.testing.assert_allclose(result.scores[-1], expected, atol=ATOL)


@pytest.mark.further
def test_streams_go_on_between_the_steps_of_branches(engine: Engine) -> None:
    """Check that a stream gets tokens while branches are fed, and that steps are as narrow as beside it."""
    prompt, known = tokens(3, 20), [branch(seed, 30) for seed in range(20)]
    stream = engine.submit(tokens(4, 20), SamplingParams(max_new_tokens=60, min_tokens=59), "serial", stream="text")
    scored = engine.submit_checked(engine.check_branches(prompt, known))
    grown = []
    while scored.result is None:
        engine.step(1)
        grown.append(len(stream.partial().token_ids))
    assert scored.result.stats.steps >= 600 // 64, "beside a stream, a step has at most 64 tokens"
    assert np.count_nonzero(np.diff(grown)) >= scored.result.stats.steps - 2, (
        "each step of branches has one of the stream"
    )
    stream.cancel()
    alone = engine.submit_checked(engine.check_branches(prompt, known)).wait().stats
    assert alone.steps == 5 + 2, "full programs: 480 = 3 * 128 + 64 + 32 and 120 = 64 + 56 tokens"


@pytest.mark.further
def test_requests_share_steps_where_that_is_cheaper(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check three requests: by tokens, each has its own step; where all steps cost the same, they share one."""
    lm, prompts = engine.lm, [tokens(20 + n, 15 + n) for n in range(3)]
    known = [[branch(30 + n, 25), branch(40 + n, 30 + n)] for n in range(3)]
    seen: list[list[int]] = []

    def count(*arguments: Any) -> Any:
        seen.append(sorted({int(row) for row in arguments[2].unpack().row} - {engine.max_batch}))
        return score(*arguments)

    monkeypatch.setattr(infer.scheduling.runner, "score", count)
    for cost in (None, None, StepCost(1.0, 0.0, 0.0)):  # the first run feeds the prompts, at different times
        monkeypatch.setattr(engine._scheduler.runner, "cost", cost)
        seen.clear()
        results = [engine.submit_checked(engine.check_branches(*pair)) for pair in zip(prompts, known, strict=True)]
        for handle, prompt, own in zip(results, prompts, known, strict=True):
            result = handle.wait()
            assert result.stats.steps == 1
            for one, read in zip(own, result.scores, strict=True):
                np.testing.assert_allclose(read, alone(lm, prompt, one), atol=ATOL)
        assert len(seen) == 3 if cost is None else len(seen) == 1 and len(seen[0]) == 3


@pytest.mark.further
def test_requests_share_what_a_step_can_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check two requests that together read more than a program does: the second goes on in the next step."""
    monkeypatch.setattr(engine._scheduler.runner, "cost", StepCost(1.0, 0.0, 0.0))
    ids, prompts = tokens(50, 60), [tokens(51, 9), tokens(52, 12)]
    dense = ScoredBranch(ids, tuple(range(59)), ids[1:])
    wide = ScoredBranch(ids[:2], (0, *(1,) * (MAX_READS - 3)), (5,) * (MAX_READS - 2))
    asked = list(zip(prompts, (wide, dense), strict=True))
    handles = [engine.submit_checked(engine.check_branches(prompt, [one])) for prompt, one in asked]
    for handle, (prompt, one) in zip(handles, asked, strict=True):
        np.testing.assert_allclose(handle.wait().scores[0], alone(engine.lm, prompt, one), atol=ATOL)
    first, second = (handle.wait().stats.steps for handle in handles)
    assert first == 1 < second


def test_prompts_and_their_caches(engine: Engine) -> None:
    """Check that a prompt is fed once, and that neither branches nor earlier contents of the row remain."""
    engine.reset_cache()
    prompt, known = tokens(5, 100), [branch(1, 20), branch(2, 20)]
    first = engine.submit_checked(engine.check_branches(prompt, known)).wait()
    again = engine.submit_checked(engine.check_branches(prompt, known[::-1])).wait()
    assert (first.stats.reused_tokens, again.stats.reused_tokens) == (0, 99)
    np.testing.assert_allclose(again.scores[::-1], first.scores, atol=ATOL)
    assert first.finish_reason == "stop" and first.token_ids == [] and first.stats.scored_tokens == 40
    params = SamplingParams(temperature=0.0, max_new_tokens=20)
    (after,) = engine.generate([(*prompt, *known[0].tokens)], params, "serial")
    engine.reset_cache()
    assert engine.generate([(*prompt, *known[0].tokens)], params, "serial")[0].token_ids == after.token_ids
    assert after.stats.reused_tokens == 100, "the prompt, and no branch"


@pytest.mark.further
def test_prompts_with_blocks(engine: Engine) -> None:
    """Check branches behind an answer with a block, whose slots are not in order, fresh and reused."""
    special = engine.config.special
    titles = [token for title in (60, 61) for token in (special.title_start, title, special.title_end)]
    texts = [[*tokens(seed, 5 * seed), special.branch_end] for seed in (1, 2)]
    script = [[64, *titles, special.parallel_start, 65, engine.config.end[0]], *texts]
    answer = engine.generate([tokens(6, 30)], SamplingParams(script=script, max_new_tokens=80))[0]
    assert answer.stats.blocks == 1 and answer.finish_reason == "stop"
    prompt = [*answer.prompt_token_ids, *answer.token_ids, 70, 71]  # the slots of branches are interleaved
    reused = engine.submit_checked(engine.check_branches(prompt, [branch(3, 9)])).wait()
    assert reused.stats.reused_tokens > len(answer.prompt_token_ids)
    np.testing.assert_allclose(reused.scores[0], alone(engine.lm, prompt, branch(3, 9)), atol=ATOL)
    third = engine.submit_checked(engine.check_branches([*prompt, 72], [branch(4, 9)])).wait()
    np.testing.assert_allclose(third.scores[0], alone(engine.lm, [*prompt, 72], branch(4, 9)), atol=ATOL)
    engine.reset_cache()
    np.testing.assert_allclose(engine.score(prompt, [branch(3, 9)])[0], reused.scores[0], atol=ATOL)


def test_many_reads(engine: Engine) -> None:
    """Check a token with as many reads as a program has, and branches that read at each of their tokens."""
    prompt, ids = tokens(7, 10), tokens(8, 200)
    wide = ScoredBranch(ids[:2], (1,) * MAX_READS, (5,) * MAX_READS)
    dense = ScoredBranch(ids, tuple(range(199)), ids[1:])
    for known, read in zip([wide, dense], engine.score(prompt, [wide, dense]), strict=True):
        np.testing.assert_allclose(read, alone(engine.lm, prompt, known), atol=ATOL)


def test_packs_have_room() -> None:
    known = KnownTokens([branch(seed, 30) for seed in range(10)], 100)
    assert (known.size, known.place.max()) == (300, 89)
    assert [known.left(start) for start in (0, 30, 89, 90, 270)] == [90, 60, 1, 90, 30]
    parts = [score_inputs({2: (known, 30 * start, 30)}, 4, Bucket(1, 64, 64, 512))[0] for start in range(10)]
    assert [(int(part.place[0]), int(part.branch[0])) for part in parts] == [*[(0, 1), (30, 2), (60, 3)] * 3, (0, 1)]
    assert all(part.row.tolist() == [2] * 30 + [4] * 34 for part in parts)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ([], "at least one"),
        ([ScoredBranch((), (), ())], "expected tokens"),
        ([ScoredBranch((5,), (1,), (5,))], "ascending places"),
        ([ScoredBranch((5,), (0, 0), (5,))], "an id each"),
        ([ScoredBranch((5,), (0,), (1 << 20,))], "expected ids"),
        ([ScoredBranch((5,), (0,) * (MAX_READS + 1), (5,) * (MAX_READS + 1))], f"at most {MAX_READS} ids"),
        ([ScoredBranch((5,) * 503, (0,), (5,))], "at most 502 tokens"),
    ],
)
def test_refusals(engine: Engine, known: list[ScoredBranch], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.score(tokens(0, 10), known)
