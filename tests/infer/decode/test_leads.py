"""Titles that are leads: the number is stated first, tags between leads take no step, and leads are plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import infer.control.tags
from aspd_jax import LanguageModel
from aspd_jax.errors import RequestError
from aspd_jax.model.transformer import Transformer
from aspd_jax.structure import Branch, Item, Parallel, Serial, plain_text
from aspd_jax.tokens import BlockIds, SerialIds, split
from infer import Engine, SamplingParams
from infer.control.tags import number_tokens
from infer.scheduling.admission import classes_of
from notebooks.figures import timeline
from tests.helpers.answers import full_pass
from tests.helpers.replay import replay

LEADS = ("\n\n1. One:", "\n\n2. Two, of two:", "\n3. Three")
EXAMPLE: tuple[Item, ...] = (
    Serial("Well:"),
    Parallel([Branch(lead, f"{lead} some text.{'.' * number}") for number, lead in enumerate(LEADS)]),
    Serial("\n\nAnd:"),
    Parallel([Branch("\n- a", "\n- a"), Branch("\n- b", "\n- b is longer than a")]),
    Serial("\n\nEnd"),
)


@pytest.fixture(scope="module")
def leads_lm(lm: LanguageModel) -> LanguageModel:
    config = replace(lm.config, titles="leads")
    return replace(lm, config=config, model=Transformer(config))


@pytest.fixture(scope="module")
def engine(leads_lm: LanguageModel) -> Engine:
    return Engine(leads_lm, max_length=512, max_batch=8, max_branches=12, max_title_tokens=20)


@pytest.fixture(scope="module")
def drafting(leads_lm: LanguageModel) -> Engine:
    return Engine(
        leads_lm, max_length=512, max_batch=2, max_branches=12, max_title_tokens=20,
        drafts="lookup", draft_tokens=3, force_drafts=True,
    )  # fmt: skip


def path_of(engine: Engine, ids: Sequence[int]) -> int:
    """Return the critical path, from the tokens of an answer alone: tags between leads and `<|para|>` take no step.

    `<|para|>` in place of a further lead takes one.
    """
    special, path, ended = engine.config.special, 0, bool(ids) and ids[-1] in engine.config.end
    for item in split(ids[:-1] if ended else ids, special, engine.config.form):
        if isinstance(item, SerialIds):
            path += len(item.ids)
        else:
            path += 2 + len(item.number) + sum(len(title) + 1 for title in item.titles)
            path += max(len(text.ids) for text in item.texts) + 1
            path += len(item.titles) < int(engine.lm.codec.text.decode(item.number))
    return path + ended


@pytest.mark.further
@pytest.mark.parametrize("after_block", [False, True])
def test_stepwise_logits_equal_the_full_pass(engine: Engine, after_block: bool) -> None:
    special, codec = engine.config.special, engine.lm.codec
    prompt = codec.linearise(EXAMPLE[:3] if after_block else EXAMPLE[:1]).tokens.tolist()
    answer = [*codec.linearise(EXAMPLE).tokens.tolist(), engine.config.end[0]]
    trace = replay(engine, prompt, answer)
    np.testing.assert_allclose(trace.logits, full_pass(engine.lm, special, prompt, answer), atol=1e-4)
    assert trace.steps == path_of(engine, answer) - 1
    assert sum(trace.widths) == len(answer) - 1, "every token is fed once"


@pytest.mark.further
def test_random_answers_are_well_formed_and_in_budget(engine: Engine) -> None:
    random = np.random.default_rng(0)
    special, codec = engine.config.special, engine.lm.codec
    blocks, shorter, taken_back, reasons, numbers = 0, 0, 0, set(), set()
    biased = (special.title_start, special.title_end, special.branch_end)
    for seed in range(3):
        budgets = [int(b) for b in random.integers(1, 400, 48)]
        params = [
            SamplingParams(
                temperature=float(random.choice([1.0, 3.0, 100.0])),
                max_new_tokens=budget,
                max_branch_tokens=int(random.choice([1, 2, 6, 50])),
                logit_bias=dict.fromkeys(map(str, biased), 100.0 if number % 2 else 4.0),
                seed=seed * 48 + number,
            )
            for number, budget in enumerate(budgets)
        ]
        for budget, result in zip(budgets, engine.generate([[1, 2, 3]] * 48, params), strict=True):
            ids = result.token_ids
            assert len(ids) <= budget
            ended = bool(ids) and ids[-1] in engine.config.end
            whole = ids[:-1] if ended else ids
            items = split(whole, special, engine.config.form)
            structure = codec.parse(whole)
            if result.finish_reason != "length":
                assert plain_text(structure) == result.text
            assert result.stats.steps == max(0, result.stats.critical_path + result.stats.discarded_tokens - 1)
            path = path_of(engine, ids)
            taken_back += bool(result.stats.discarded_tokens and not result.stats.blocks)
            assert (
                path == result.stats.critical_path
                if result.finish_reason == "stop"
                else path <= (result.stats.critical_path)
            )
            for item in items:
                if not isinstance(item, BlockIds):
                    continue
                blocks += 1
                number = int(codec.text.decode(item.number))
                assert 2 <= number <= 12 and codec.text.decode(item.number) == str(number)
                assert len(item.titles) <= number
                assert len({tuple(title) for title in item.titles}) == len(item.titles)
                assert all(0 < len(title) <= 20 for title in item.titles)
                shorter += len(item.titles) < number
                numbers.add(number)
            reasons.add(result.finish_reason)
    assert blocks > 100 and reasons == {"stop", "length"} and len(numbers) > 5 and max(numbers) > 9
    assert shorter, "a repeated lead, or one without end, has ended a list"
    assert taken_back, "a block was taken back"


@pytest.mark.further
@pytest.mark.parametrize("limit", [3, 9, 12, 150])
def test_numbers_of_leads_are_those_that_the_engine_can_decode(engine: Engine, limit: int) -> None:
    """Compare with all strings of digits: none begins with 0, none exceeds the limit, and 1 has to continue."""
    codec, vocabulary = engine.lm.codec.text, engine.lm.config.vocab_size
    before = codec.encode("a")
    texts = [codec.decode([*before, token])[1:] for token in range(vocabulary)]
    possible = {str(number) for number in range(2, limit + 1)}
    prefixes = {number[:size] for number in possible for size in range(1, len(number) + 1)}
    classes = classes_of(engine.lm, engine.config)
    for written in ["", *sorted(prefixes)[:40]]:
        legal = number_tokens(int(written or "0"), limit, classes)
        allowed = {text for text, fits in zip(texts, legal, strict=False) if fits}
        assert allowed == {text for text in texts if text and written + text in prefixes}


def written(engine: Engine, structure: Sequence[Item], number: int | None = None) -> SamplingParams:
    """Return parameters with which an engine writes a structure of one block."""
    codec, special = engine.lm.codec, engine.config.special
    serial, branches = list[int](), list[list[int]]()
    for item in split(codec.linearise(structure).tokens, special, codec.form):
        if isinstance(item, SerialIds):
            serial += item.ids
            continue
        stated = item.number if number is None else codec.text.encode(str(number))
        serial += [special.title_start, *stated, special.title_end]
        for title in item.titles:
            serial += [*title, special.title_end]
        branches = [[*text.ids, special.branch_end] for text in item.texts]
    return SamplingParams(max_new_tokens=200, script=[[*serial, engine.lm.end_ids[0]], *branches])


@pytest.mark.further
def test_text_is_lead_and_body_of_every_part(engine: Engine) -> None:
    structure = EXAMPLE[:3]
    events = list(engine.submit([1, 2], written(engine, structure), stream="branches"))
    result = events[-1].result
    assert result is not None and result.structure == structure and result.text == plain_text(structure)
    assert result.text == "Well:\n\n1. One: some text.\n\n2. Two, of two: some text..\n3. Three some text...\n\nAnd:"
    streamed = {n: "".join(e.text for e in events if e.kind == "token" and e.branch == n) for n in range(4)}
    assert [streamed[n] for n in (1, 2, 3)] == [branch.text for branch in structure[1].branches]  # type: ignore[union-attr]
    fork = next(event for event in events if event.kind == "fork")
    assert fork.titles == LEADS
    text = "".join(
        e.text for e in engine.submit([1, 2], written(engine, structure), stream="text") if e.kind == "token"
    )
    assert text == result.text
    encode = engine.lm.codec.text.encode
    # The host decides at the first tag, behind each digit and title, and where a lead could repeat another.
    assert 3 + len(LEADS) <= result.stats.decisions <= 3 + 3 * len(LEADS) and result.stats.seconds["deciding"] > 0
    assert engine.generate([[1, 2]], SamplingParams(max_new_tokens=8), mode="serial")[0].stats.decisions == 0
    spans = timeline(engine.config, result)
    assert max(span.end for span in spans) == result.stats.critical_path
    assert sum(span.content for span in spans) == result.stats.content_tokens + 1, "with the end of text"
    assert [span.label for span in spans if span.kind == "branch"] == [" ".join(lead.split()) for lead in LEADS]
    content = sum(len(encode(text)) for text in ("Well:", *LEADS, "\n\nAnd:"))
    content += sum(len(encode(b.text.removeprefix(b.title))) for b in structure[1].branches)  # type: ignore[union-attr]
    assert result.stats.content_tokens == content


@pytest.mark.further
def test_budget_of_text_counts_leads_in_reading_order(engine: Engine) -> None:
    asked = written(engine, EXAMPLE[:3])
    whole = engine.generate([[1, 2]], asked)[0]
    sizes = []
    for limit in range(1, whole.stats.content_tokens + 2):
        result = engine.generate([[1, 2]], replace(asked, max_content_tokens=limit))[0]
        assert whole.text.startswith(result.text)
        assert result.stats.content_tokens == min(limit, whole.stats.content_tokens)
        assert (result.finish_reason == "stop") == (limit > whole.stats.content_tokens)
        sizes.append(len(result.text))
    assert sizes == sorted(sizes) and sizes[-1] == len(whole.text)


@pytest.mark.further
@pytest.mark.parametrize("stop", ["1. O", "One: so", "text.\n", ":\n\n1", "\n3", "\n\nAnd"])
def test_stop_strings_are_found_in_leads_and_across_them(engine: Engine, stop: str) -> None:
    asked = replace(written(engine, EXAMPLE[:3]), stop=[stop])
    whole = plain_text(EXAMPLE[:3])
    for stream in ("text", "branches"):
        events = list(engine.submit([1, 2], asked, stream=stream))  # type: ignore[arg-type]
        result = events[-1].result
        assert result is not None and result.text == whole[: whole.index(stop)] and result.finish_reason == "stop"


@pytest.mark.further
@pytest.mark.parametrize("tries", [1, 4, 3])
@pytest.mark.parametrize("kind", ["equal", "goes on", "similar"])
def test_a_lead_that_repeats_another_is_sampled_again(
    engine: Engine, drafting: Engine, kind: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three tries, a lead that begins with all of another ends the list; a similar one stays.

    What is taken back is no part of the answer, and changes nothing behind it.
    """
    again = Branch("\n3. One" + " one" * (kind == "similar"), "\n3. One" + " one" * (kind == "similar") + " text")
    two = EXAMPLE[1].branches[:2]  # type: ignore[union-attr]
    after_four = Parallel([*two, again] if kind == "similar" else two)
    expected = (EXAMPLE[0], EXAMPLE[1] if tries < 4 else after_four, EXAMPLE[2])
    asked = written(engine, expected, number=3)
    special, encode = engine.config.special, engine.lm.codec.text.encode
    markers, lead = lead_parts(engine, again.title if kind == "similar" else LEADS[0].replace("\n\n1", "\n3"))
    behind = encode(" so")[0] if kind == "goes on" else special.title_end
    serial = list(asked.script[0])
    at = [place for place, token in enumerate(serial) if token == special.title_end][2] + 1  # the second lead ends here
    rest = serial[at:]
    if len(expected[1].branches) == 3:  # type: ignore[union-attr]
        assert rest[: len(markers)] == markers
        rest = rest[len(markers) :]  # they are not sampled again
        tries -= tries == 4  # the last of the four stays
    attempts = [token for _ in range(tries) for token in (*lead, behind)]
    script = [[*serial[:at], *markers, *attempts, *rest], *asked.script[1:]]
    asked = replace(asked, script=script, max_new_tokens=300)
    result = engine.generate([[1, 2]], asked)[0]
    assert result.structure == expected
    assert result.stats.discarded_tokens == tries * (len(lead) + 1) + (len(markers) - 1) * (tries == 4)
    assert result.stats.steps == result.stats.critical_path + result.stats.discarded_tokens - 1
    assert result.stats.critical_path == path_of(engine, result.token_ids)
    logits = replay(engine, [1, 2], result.token_ids).logits
    np.testing.assert_allclose(logits, full_pass(engine.lm, special, [1, 2], result.token_ids), atol=1e-4)
    assert drafting.generate([[1, 2]], asked)[0].token_ids == result.token_ids
    events = list(engine.submit([1, 2], asked, stream="text"))
    assert "".join(event.text for event in events if event.kind == "token") == result.text
    ended = len(result.structure[1].branches) == 2  # type: ignore[union-attr]
    used = len(result.token_ids) + result.stats.discarded_tokens + ended  # with the `<|title|>` of the repetition
    for limit in range(used - 1, used + 2):
        limited = engine.generate([[1, 2]], replace(asked, max_new_tokens=limit))[0]
        assert (limited.token_ids == result.token_ids) == (limit >= used)
    monkeypatch.setattr(infer.control.tags, "MAX_TRIES", 0)
    assert engine.generate([[1, 2]], asked)[0].structure != expected or tries == 4, "negative control"


@pytest.mark.further
def test_the_first_token_of_a_repetition_is_barred(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a model that always prefers it, within every budget."""
    markers, lead = lead_parts(engine, LEADS[0].replace("\n\n1", "\n3"))
    special, encode = engine.config.special, engine.lm.codec.text.encode
    script = [[*begun(engine, [encode(text) for text in (*LEADS[:2], "")]), *markers, *lead, special.title_end]]
    bias = {str(lead[0]): 50.0, str(special.title_end): 100.0}
    asked = SamplingParams(max_new_tokens=200, max_branch_tokens=2, script=script, logit_bias=bias)

    def third(limit: int) -> list[int]:
        result = engine.generate([[1, 2]], replace(asked, max_new_tokens=limit))[0]
        assert len(result.token_ids) + result.stats.discarded_tokens <= limit
        items = split(result.token_ids, special, engine.config.form)
        titles = next((item.titles for item in items if isinstance(item, BlockIds)), ())
        return list(titles[2]) if len(titles) == 3 else []

    free = third(200)
    assert free[: len(markers)] == markers and free[len(markers)] not in (lead[0], special.title_end)
    assert {tuple(third(limit)) for limit in range(len(script[0]), 120, 4)} == {(), tuple(free)}
    monkeypatch.setattr(infer.control.tags.Tags, "_again", lambda *_: None)
    assert not third(200), "negative control"


def lead_parts(engine: Engine, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a lead up to its first letter, and the others."""
    tokens, decode = engine.lm.codec.text.encode(text), engine.lm.codec.text.decode
    size = next(size for size in range(len(tokens)) if any(map(str.isalpha, decode(tokens[: size + 1]))))
    return tokens[:size], tokens[size:]


def begun(engine: Engine, leads: Sequence[Sequence[int]], stated: int = 3) -> list[int]:
    """Return the tokens that an engine samples of a text and of the leads of a block; the last lead stays open."""
    special, encode = engine.config.special, engine.lm.codec.text.encode
    serial = [*encode("Well:"), special.title_start, *encode(str(stated)), special.title_end]
    return [*serial, *leads[0], *(token for lead in leads[1:] for token in (special.title_end, *lead))]


@pytest.mark.further
@pytest.mark.parametrize(
    ("before", "draft_tokens"),
    [(0, 0), (1, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, 3), (1, 0)))],
)
def test_a_block_with_a_lead_without_end_is_taken_back(
    before: int, draft_tokens: int, leads_lm: LanguageModel, engine: Engine, drafting: Engine
) -> None:
    """The first lead is serial text, and what follows never saw the block: compare with serial mode."""
    encode, endless = engine.lm.codec.text.encode, [*range(100, 121)]
    kept = encode(LEADS[0]) if before else endless[:20]
    script = begun(engine, [kept, endless] if before else [endless])
    own = drafting if draft_tokens else engine
    title = {str(own.config.special.title_start): 100.0}  # the model would fork all the time
    free = {"max_branch_tokens": 4, "logit_bias": title}
    for prompt in map(encode, ("a", "Hello", "x, y")):
        result = own.generate([prompt], SamplingParams(max_new_tokens=120, script=[script], **free))[0]  # type: ignore[arg-type]
        text = [*encode("Well:"), *kept]
        assert result.token_ids[: len(text)] == text
        serial = own.generate([[*prompt, *text]], SamplingParams(max_new_tokens=40), mode="serial")[0].token_ids
        after = result.token_ids[len(text) :]
        assert len(after) > 20 and after[: len(serial)] == serial[: len(after)]
        assert result.stats.blocks == 0 and len(result.structure) == 1
        assert result.stats.discarded_tokens == len(script) - len(text)
        assert result.stats.generated_tokens == result.stats.content_tokens == len(result.token_ids)
        if not draft_tokens:
            assert result.stats.steps == result.stats.critical_path + result.stats.discarded_tokens - 1
    # Negative control: with room for the lead, the block remains.
    wide = Engine(leads_lm, max_length=512, max_batch=1, max_branches=12, max_title_tokens=21)
    leads = [kept, endless, [50]] if before else [endless, [50], [51]]
    script = [*begun(engine, leads), engine.config.special.title_end]
    assert wide.generate([[1, 2]], SamplingParams(max_new_tokens=200, script=[script]))[0].stats.blocks == 1


@pytest.mark.further
@pytest.mark.parametrize("before", [0, 1])
def test_a_block_is_taken_back_within_every_budget(before: int, engine: Engine) -> None:
    encode, endless = engine.lm.codec.text.encode, [*range(100, 121)]
    kept = encode(LEADS[0]) if before else endless[:20]
    script = begun(engine, [kept, endless] if before else [endless])
    text = [*encode("Well:"), *kept]
    asked = SamplingParams(max_new_tokens=200, script=[script])
    whole = engine.generate([[1, 2]], asked)[0].token_ids
    for limit in range(1, len(text) + 6):
        ids = engine.generate([[1, 2]], replace(asked, max_content_tokens=limit))[0].token_ids
        assert ids == whole[:limit]
    sizes, spent = set(), len(script) + 1 + before + len(kept)  # known tags count, and the first lead is fed again
    for limit in range(len(script), len(script) + 60):
        result = engine.generate([[1, 2]], replace(asked, max_new_tokens=limit))[0]
        assert result.token_ids == whole[: len(result.token_ids)] and result.finish_reason == "length"
        sizes.add(len(result.token_ids))
        if len(result.token_ids) > len(encode("Well:")):  # otherwise the reserve of a block does not fit
            assert len(result.token_ids) == len(text) + max(0, limit - spent)
    assert min(sizes) == len(encode("Well:")) and max(sizes) > len(text)


@pytest.mark.further
def test_a_later_lead_without_end_ends_the_list(engine: Engine) -> None:
    two = (EXAMPLE[0], Parallel(EXAMPLE[1].branches[:2]), EXAMPLE[2])  # type: ignore[union-attr]
    asked = written(engine, two, number=4)
    serial = list(asked.script[0])
    behind = [place for place, token in enumerate(serial) if token == engine.config.special.title_end][2] + 1
    script = [[*serial[:behind], *range(100, 121), *serial[behind:]], *asked.script[1:]]
    result = engine.generate([[1, 2]], replace(asked, script=script))[0]
    assert result.structure == two and result.stats.discarded_tokens == 20
    assert result.stats.steps == result.stats.critical_path + result.stats.discarded_tokens - 1


@pytest.mark.further
def test_penalties_take_leads_for_text(engine: Engine) -> None:
    """Check that penalties count each lead once, as in serial text, and not its copy in the head."""
    codec, special, end = engine.lm.codec, engine.config.special, engine.config.end
    asked = written(engine, EXAMPLE[:2])
    script = [asked.script[0], [], *asked.script[2:]]  # the first branch is free
    free = replace(asked, script=script, max_branch_tokens=2, logit_bias={str(special.branch_end): -100.0})
    head = [special.branch_start, *codec.text.encode(LEADS[0])]

    def first_token(penalty: float) -> tuple[int, np.ndarray]:
        ids = engine.generate([[1, 2]], replace(free, frequency_penalty=penalty))[0].token_ids
        at = ids.index(special.branch_start) + len(head)
        return ids[at], replay(engine, [1, 2], ids).logits[at - 1]

    plain, logits = first_token(0.0)
    seen = Counter(token for text in ("Well:", *LEADS) for token in codec.text.encode(text))
    for penalty in (0.5, -0.5, 2.0, -2.0):
        expected = logits.copy()
        for token, times in seen.items():
            expected[token] -= penalty * times
        expected[[*special.ids, *end]] = -np.inf
        assert first_token(penalty)[0] == expected.argmax()
    assert plain == np.where(np.isin(np.arange(logits.size), [*special.ids, *end]), -np.inf, logits).argmax()


def test_a_text_that_does_not_begin_with_its_lead_is_refused(engine: Engine) -> None:
    block = Parallel([Branch("one", "one: x"), Branch("two", "x")])
    with pytest.raises(Exception, match=r"begins with its title 'two'"):
        engine.lm.codec.linearise([block])


def test_separators_are_refused(leads_lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="expected None for a model whose titles are leads"):
        Engine(leads_lm, max_length=64, separator_ids=[1])
