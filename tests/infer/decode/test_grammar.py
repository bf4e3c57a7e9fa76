"""No malformed structure, whatever the weights; steps are the critical path (protocol, sections 5 and 6.5)."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import infer.decode.grammar
from aspd_jax import LanguageModel
from aspd_jax.errors import StructureError
from infer import Engine, SamplingParams
from tests.conftest import patched
from tests.helpers.answers import SEPARATOR, TEXT, linearise


def well_formed(engine: Engine, ids: list[int]) -> bool:
    """An answer against a regular expression over the tags, and heads against titles: independent of the project."""
    special = engine.config.special
    names = dict(zip(special.ids, "tTpPbB", strict=True)) | dict.fromkeys(engine.config.end, "$")
    letters = "".join(names.get(token, ".") for token in ids)
    if not re.fullmatch(r"\.*((t\.+T){2,}p(b\.*B){2,}P\.*)*\$?", letters):
        return False
    for found in re.finditer(r"(t\.+T)+p(b\.*B)+P", letters):
        block = ids[found.start() : found.end()]
        shape = letters[found.start() : found.end()]
        titles = [block[m.start() + 1 : m.end() - 1] for m in re.finditer(r"t\.+T", shape)]
        branches = [block[m.start() + 1 : m.end() - 1] for m in re.finditer(r"b\.*B", shape)]
        if len(titles) != len(branches) or len(titles) > engine.config.max_branches:
            return False
        for own, branch in zip(titles, branches, strict=True):
            head = [*own, *engine.config.form.separator]
            if branch[: len(head)] != head or len(own) > engine.config.max_title_tokens:
                return False
    return True


def titles_of(engine: Engine, ids: list[int]) -> list[list[list[int]]]:
    """Return the titles of every block of an answer."""
    letters = ids_as_letters(engine, ids)
    return [
        [ids[block.start() + m.start() + 1 : block.start() + m.end() - 1] for m in re.finditer(r"t\.+T", block[0])]
        for block in re.finditer(r"(t\.+T)+p", letters)
    ]


def path_of(engine: Engine, ids: list[int]) -> int:
    """Return the critical path, from the tokens of an answer alone."""
    special, path, blocks, inside, longest = engine.config.special, 0, 0, 0, 0
    titles: list[int] = []
    size = 0
    for token in ids:
        if token == special.branch_start:
            inside, size = 1, 0
        elif token == special.branch_end:
            head = titles.pop(0) + len(engine.config.form.separator)
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


@pytest.mark.parametrize("waves", [4, pytest.param(16, marks=pytest.mark.further)])
def test_random_answers_are_well_formed_and_in_budget(engine: Engine, waves: int) -> None:
    random = np.random.default_rng(0)
    wave, blocks, discarded, reasons = 64, 0, 0, set()
    for seed in range(waves):
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
            if not ids:  # it would have begun with a block that has no room
                assert result.finish_reason == "length"
                continue
            assert result.finish_reason == "length" or ids[-1] == 0
            cut = budget - len(ids) < 4 * result.stats.branches  # the reserve of the grammar
            for branch in re.findall(r"b\.*B", ids_as_letters(engine, ids)):
                cut |= len(branch) >= asked.max_branch_tokens  # with its head, so rather too often
            assert result.finish_reason == "stop" or ids[-1] != 0 or cut
            assert result.stats.generated_tokens == len(ids)
            # The path has tokens that the budget has no room for in reading order, too.
            path, own = result.stats.critical_path, path_of(engine, ids)
            assert path == own if result.finish_reason == "stop" else path >= own
            assert result.stats.steps == result.stats.critical_path + result.stats.discarded_tokens - 1
            discarded += result.stats.discarded_tokens
            for titles in titles_of(engine, ids):
                assert all(titles.count(title) == 1 for title in titles), titles
            blocks += result.stats.blocks
            reasons.add(result.finish_reason)
            for branch in re.findall(r"b\.*B", ids_as_letters(engine, ids)):
                assert len(branch) <= 2 + 3 + 2 + asked.max_branch_tokens - 1
    assert blocks > 18 * waves and discarded > 0
    assert reasons == {"stop", "length"}


def ids_as_letters(engine: Engine, ids: list[int]) -> str:
    names = dict(zip(engine.config.special.ids, "tTpPbB", strict=True))
    return "".join(names.get(token, ".") for token in ids)


@pytest.mark.further
def test_without_the_grammar_answers_are_malformed(engine: Engine) -> None:
    """Check that answers are malformed without the grammar (negative control of the fuzz test)."""
    malformed = 0
    with patched(
        infer.decode.grammar, legal_tokens=lambda state, derived, config, lanes: np.ones((lanes.row.size, 24), bool)
    ):
        for seed in range(12):
            asked = SamplingParams(temperature=100.0, max_new_tokens=60, seed=seed)
            try:
                malformed += not well_formed(engine, engine.generate([[1]], asked)[0].token_ids)
            except StructureError:
                malformed += 1
    assert malformed >= 6


def test_serial_mode_never_forks(engine: Engine) -> None:
    params = [SamplingParams(temperature=100.0, max_new_tokens=80, seed=seed) for seed in range(32)]
    serial = engine.generate([[1]] * 32, params, mode="serial")
    assert not any(set(result.token_ids) & set(engine.config.special.ids) for result in serial)
    adaptive = engine.generate([[1]] * 32, params, mode="adaptive")
    assert any(result.stats.blocks for result in adaptive), "negative control"


@pytest.mark.further
def test_end_of_text_in_a_branch_is_its_closing_tag(bare_lm: LanguageModel, engine: Engine) -> None:
    """With half of the vocabulary ending the text, branches end by their tag and hold none of it."""
    ends = set(TEXT[1:])
    ending = Engine(
        replace(bare_lm, end_ids=tuple(ends)),
        max_length=256,
        max_batch=2,
        max_branches=3,
        max_title_tokens=2,
        separator_ids=SEPARATOR,
    )
    params = [SamplingParams(temperature=100.0, max_new_tokens=120, seed=seed) for seed in range(16)]
    contents: dict[Engine, list[set[int]]] = {ending: [], engine: []}
    for own in contents:
        prompt = [1, *linearise(own.config.special, [[1]], end=None)]
        for result in own.generate([prompt] * len(params), params):
            letters = ids_as_letters(own, result.token_ids)
            for found in re.finditer(r"b\.*B", letters):
                contents[own].append(set(result.token_ids[found.start() + 1 : found.end() - 1]))
    assert not any(inside & ends for inside in contents[ending])
    assert any(inside & ends for inside in contents[engine]), "negative control: elsewhere they are text"
