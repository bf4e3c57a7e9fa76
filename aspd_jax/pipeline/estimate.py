"""Estimate of the calls, tokens and cost of a run."""

from __future__ import annotations

from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.measures import estimate_tokens
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.pieces import numbered
from aspd_jax.pipeline.teacher import read_prompts
from aspd_jax.pipeline.work import Shard, answers_of, counter
from aspd_jax.sources import Conversation

ANNOTATION = 120  # mean tokens of a candidate: a number and a title for every part
VOTE = 60  # mean tokens of a vote


def estimate(config: DataConfig, source: str, shard: Shard) -> str:
    """Return a summary of the answers, calls, tokens and cost of a run.

    The figures assume that no call is repeated and that all candidates reach the vote.

    Raises:
        AspdError: see `aspd_jax.pipeline.build.build`.
    """
    teacher, count = config.teacher, counter(config.tokenizer)
    prompts = {name: estimate_tokens(text) for name, text in read_prompts(teacher.prompts).items()}
    candidates = teacher.candidates if teacher.base_url else 0
    votes = teacher.votes if teacher.base_url else 0
    answers = long = with_form = calls = read = written = 0
    for record in shard.records(source):
        if not isinstance(record, Conversation):
            continue
        for _, answer in answers_of(record):
            tokens = count(answer.text)
            answers += 1
            if tokens < config.select.min_tokens:
                continue
            long += 1
            forms = len(propose(answer.text)) if config.rules else 0
            with_form += bool(forms)
            asked = tokens + count(answer.question)
            calls += candidates + votes * (candidates + forms)
            read += candidates * (prompts["annotate"] + count(answer.question) + count(numbered(answer.text)))
            read += votes * (candidates + forms) * (prompts["independence"] + asked + tokens)
            written += candidates * ANNOTATION + votes * (candidates + forms) * VOTE
    lines = [
        f"{answers} answers, {long} of {config.select.min_tokens} tokens or more, "
        f"{with_form} of these with a block by their form",
        f"at most {calls} calls, about {read} tokens to read and {written} to write",
    ]
    if teacher.input_price or teacher.output_price:
        cost = (read * teacher.input_price + written * teacher.output_price) / 1e6
        lines.append(f"about {cost:.2f} at {teacher.input_price} and {teacher.output_price} a million tokens")
    return "\n".join(lines)
