"""Controller of answers that end at a stop string, or at a repeated object."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from aspd_jax.errors import TokenizerError
from aspd_jax.tokens import TextCodec
from infer.answers.answer import RequestOutput
from infer.answers.events import EventReader, FilledReader
from infer.control.controller import Controller
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


@lru_cache(maxsize=64)
def stop_tokens(params: SamplingParams, codec: TextCodec, words: int) -> np.ndarray:
    """Return the tokens that may complete a stop string or an object, uint32 [W].

    These are the tokens with its last byte, or all tokens of a tokenizer whose tokens have no bytes of their own.
    """
    ends = {text.encode()[-1] for text in params.stop} | ({ord("}")} if params.end_at_repeat is not None else set())
    stops = np.zeros(32 * words, bool)
    try:
        stops[[token for token, text in enumerate(codec.byte_tokens.tokens) if not ends.isdisjoint(text)]] = True
    except TokenizerError:
        stops[:] = True
    return np.packbits(stops, bitorder="little").view(np.uint32)
