"""Serial mode on the content of another answer: what realised speed-up compares (protocol, section 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from aspd_jax.sizes import next_power
from infer.answers.answer import Result
from infer.answers.logprobs import content_places
from infer.decode.step import Script
from infer.engine import Engine
from infer.request import SamplingParams

LEAST_SCRIPT = 256  # tokens; longer ones are filled up to a power of two, so that few programs are compiled


@contextmanager
def scripted(engine: Engine, tokens: Sequence[int]) -> Iterator[None]:
    """Meanwhile, answers in serial mode begin with these tokens. No tokens cost what many do, so that both sides of a
    comparison run the same program.
    """
    engine.scheduler.script = _script(engine, tokens)
    try:
        yield
    finally:
        engine.scheduler.script = None


def following(params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
    """Parameters of an answer that ends where a script does: an answer that was cut off had no end of text."""
    return replace(params, max_new_tokens=max(1, len(tokens)), stop=())


def content_ids(engine: Engine, result: Result) -> list[int]:
    """Tokens of an answer's plain text, and the end of text if it had one."""
    ids = result.token_ids
    content = [ids[place] for place in content_places(engine.config, ids)]
    return content + ids[-1:] * (bool(ids) and ids[-1] in engine.config.end)


def _script(engine: Engine, tokens: Sequence[int]) -> Script:
    size = max(LEAST_SCRIPT, next_power(len(tokens) + 1))
    serial = np.full((1, size), -1, np.int32)
    serial[0, : len(tokens)] = tokens
    return Script(jnp.asarray(serial), jnp.full((1, engine.config.max_branches, 1), -1, jnp.int32))
