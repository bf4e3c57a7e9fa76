"""Controller of answers that end at a stop string, or at a repeated object."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from aspd_jax.tokens import TextCodec
from infer.answers.answer import RequestOutput
from infer.answers.events import EventReader, FilledReader
from infer.control.controller import Controller
from infer.control.masks import token_bits
from infer.decode.guidance import RowGuidance
from infer.decode.state import STOP
from infer.request import SamplingParams


class TextEnd(Controller):
    """Decisions for requests whose text ends their answers.

    The sequence waits after tokens that may complete such a text (`stop_tokens`).

    Args:
        inner: controller of the answer otherwise.
        reader: reader of the answer's text, which has the events of each output before `follow`.
        filled: whether the answer is a template.
    """

    def __init__(self, inner: Controller, reader: EventReader | FilledReader, filled: bool) -> None:
        self._inner, self._reader, self._filled = inner, reader, filled

    @property
    def error(self) -> str:
        return self._inner.error

    def start(self) -> RowGuidance | None:
        return self._inner.start()

    def read(self, output: RequestOutput) -> RequestOutput:
        read = self._inner.read(output)
        # A grammar does not have to accept the text up to a stop string or a repeated object.
        return replace(read, finish=output.finish) if self._reader.stopped and not self._filled else read

    def follow(self, output: RequestOutput) -> RowGuidance:
        if self._reader.stopped:
            return RowGuidance(finish=STOP)
        guidance = self._inner.follow(output)
        late = frozenset(self._reader.branches_past_stop(output))
        if not late:
            return guidance
        # The text in reading order is known when the earlier branches have ended.
        return replace(guidance, ending=late, left={**guidance.left, 0: 0})


def stop_tokens(params: SamplingParams, codec: TextCodec, words: int) -> np.ndarray:
    """Return the tokens that may complete a stop string or an object, uint32 [W]."""
    objects = {ord("}")} if params.end_at_repeat is not None else set()
    return _tokens_with(frozenset({text.encode()[-1] for text in params.stop} | objects), codec, words)


@lru_cache(maxsize=64)
def _tokens_with(ends: frozenset[int], codec: TextCodec, words: int) -> np.ndarray:
    """Return the tokens with one of these bytes, uint32 [W]; all, if the tokenizer's have no bytes of their own."""
    if not codec.has_byte_spellings:
        return np.full(words, ~np.uint32(0))
    tokens = codec.byte_tokens.tokens[: 32 * words]
    return token_bits(np.asarray([not ends.isdisjoint(text) for text in tokens]), words)
