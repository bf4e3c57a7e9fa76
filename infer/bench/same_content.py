"""Serial mode on the content of another answer: what realised speed-up compares (protocol, section 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infer.answers.answer import Result
from infer.answers.logprobs import content_places
from infer.engine import Engine
from infer.request import SamplingParams


def saying(params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
    """Parameters of an answer in serial mode that has these tokens, and ends with them."""
    return replace(params, script=(tuple(tokens),), max_new_tokens=max(1, len(tokens)), stop=())


def content_ids(engine: Engine, result: Result) -> list[int]:
    """Tokens of an answer's plain text, and the end of text if it had one."""
    ids = result.token_ids
    content = [ids[place] for place in content_places(engine.config, ids)]
    return content + ids[-1:] * (bool(ids) and ids[-1] in engine.config.end)
