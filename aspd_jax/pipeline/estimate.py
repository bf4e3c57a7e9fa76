"""Estimate of the calls, tokens and cost of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from aspd_jax.blocks.measures import estimate_tokens
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.pieces import numbered
from aspd_jax.pipeline.rule_stages import check, propose_by_rules
from aspd_jax.pipeline.store import Store
from aspd_jax.pipeline.teacher import read_prompts
from aspd_jax.pipeline.work import Shard, Work, candidates_of

ANNOTATION = 120  # mean tokens of a candidate: a number and a title for every part
VOTE = 60  # mean tokens of a vote


def estimate(config: DataConfig, source: str, shard: Shard) -> str:
    """Return a summary of the answers, calls, tokens and cost of a run.

    Answers that a run leaves out before its calls are not counted. The figures assume that no call is repeated, and
    that all candidates of the teacher reach the vote; for candidates by form, this is computed.

    Raises:
        AspdError: see `aspd_jax.pipeline.build.build`.
    """
    texts = read_prompts(config.teacher.prompts)
    with TemporaryDirectory() as folder, closing(Store(Path(folder, "work.sqlite"))) as store:
        return _summary(Work(config, source, shard, store, texts), texts)


def _summary(work: Work, texts: Mapping[str, str]) -> str:
    config, teacher, count = work.config, work.config.teacher, work.count
    prompts = {name: estimate_tokens(text) for name, text in texts.items()}
    candidates = teacher.candidates if teacher.base_url else 0
    votes = teacher.votes if teacher.base_url else 0
    answers = long = with_form = calls = read = written = 0
    for answer in work.answers():
        tokens = count(answer.text)
        answers += 1
        if tokens < config.select.min_tokens:
            continue
        long += 1
        forms = candidates_of(propose_by_rules(work, answer))
        with_form += bool(forms)
        voted = candidates + sum(any(check(work, answer, block) is None for block in form.blocks) for form in forms)
        asked = tokens + count(answer.question)
        calls += candidates + votes * voted
        read += candidates * (prompts["annotate"] + count(answer.question) + count(numbered(answer.text)))
        read += votes * voted * (prompts["independence"] + asked + tokens)
        written += candidates * ANNOTATION + votes * voted * VOTE
    lines = [
        f"{answers} answers, {long} of {config.select.min_tokens} tokens or more, "
        f"{with_form} of these with a block by their form",
        f"at most {calls} calls, about {read} tokens to read and {written} to write",
    ]
    if teacher.input_price or teacher.output_price:
        cost = (read * teacher.input_price + written * teacher.output_price) / 1e6
        lines.append(f"about {cost:.2f} at {teacher.input_price} and {teacher.output_price} a million tokens")
    return "\n".join(lines)
