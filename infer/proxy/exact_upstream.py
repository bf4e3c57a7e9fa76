"""Exact fields on an upstream server: a draft, checked by the log probabilities of a prompt (protocol, section 5).

The answer is the one of greedy decoding under the grammar of the answer. The proxy follows the grammar itself: the next
token is the likeliest that it permits. The server needs no grammar, but has to return the likeliest tokens in the place
of each token of a prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.grammar_limits import limit_error
from aspd_jax.structure import Serial
from aspd_jax.tokens import TextCodec
from infer.answers.events import Event
from infer.control.draft_text import DraftText
from infer.control.masks import drafted, next_mask, permits, tokens_of
from infer.control.schemas import Schemas
from infer.proxy.answering import Proxied, exhaust
from infer.proxy.filling_upstream import check_template, template_events
from infer.proxy.upstream import ReadToken, UpstreamError
from infer.request import SamplingParams

ALTERNATIVES = 20  # likeliest tokens that are requested in each place: the maximum of vLLM by default
MAX_CHECKED = 256  # maximum draft tokens of a request
RUN = 8  # tokens of a request where the answer differs from its draft
BIAS = 100.0  # number added to the logits of permitted tokens where none of the likeliest is permitted


class ExactAnswering:
    """Decoder of answers that are drafted as a template, and then checked on the server.

    Args:
        codec: codec of the checkpoint's tokenizer.
        end_ids: ids of the tokens that end an answer.
    """

    def __init__(self, codec: TextCodec, end_ids: Sequence[int]) -> None:
        self._codec, self._ends = codec, frozenset(end_ids)
        self._schemas = Schemas(lambda: codec, end_ids, len(codec.byte_tokens.tokens))

    def check(self, sampling: SamplingParams) -> None:
        """Check that an answer can be decoded.

        Raises:
            RequestError: it is not greedy, or the grammar is malformed.
        """
        for name, value, expected in (
            ("temperature", sampling.temperature, 0.0),
            ("repetition_penalty", sampling.repetition_penalty, 1.0),
        ):
            if value != expected:
                raise RequestError(f"{name}: expected {expected:g} with exact fields over an upstream, got {value:g}")
        self._schemas.check_all(sampling)

    async def events(self, answer: Proxied) -> AsyncGenerator[Event, None]:
        """Decode an answer and yield its events (`infer.answers.events`) without `done`.

        Args:
            answer: the answer, whose state is updated; `check` accepts its sampling parameters.

        Raises:
            UpstreamError: the upstream refuses a request, fails, or does not return what the check needs.
            RequestError: the answer exceeds a limit of the grammar library.
        """
        prompt, limit, grammar = answer.prompt, answer.limit, answer.sampling.answer_grammar
        assert grammar is not None
        matcher = self._schemas.matcher(*grammar)
        draft = DraftText(await self._draft(answer), self._codec)
        written, stream, words = list[int](), self._codec.stream(), self._schemas.words
        answer.items, answer.tokens = [Serial("")], 0
        while not answer.finish_reason:
            most = min(limit - len(written), MAX_CHECKED)
            tokens, masks, known = drafted(matcher.copy(), draft.copy(), most, self._ends, words)
            if not tokens:
                read = await self._read([*prompt, *written], RUN, answer)
            elif all(known[: len(tokens)]):
                read = [ReadToken(token, {}) for token in tokens]
            else:
                read = await self._read([*prompt, *written, *tokens], 1, answer, echo=True)
                read = read[-len(tokens) - 1 :]
            for place, (token, likeliest) in enumerate(read):
                mask = masks[place] if place < len(masks) else next_mask(matcher, words)
                chosen = await self._choose(mask, likeliest, [*prompt, *written], answer)
                if chosen in self._ends:
                    answer.finish_reason = "stop"
                    break
                written.append(chosen)
                matcher.take([chosen])
                draft.follow([chosen])
                if matcher.error:
                    raise RequestError(limit_error(*grammar, matcher.error))
                if len(written) == limit:
                    answer.finish_reason = "length"
                if answer.finish_reason or chosen != token or not (tokens or draft.next() is None):
                    break
            new = stream.decode(written[answer.tokens :])
            answer.items, answer.tokens = [Serial(answer.text + new)], len(written)
            if new:
                yield Event("token", text=new)

    async def _draft(self, answer: Proxied) -> str:
        """Return the template of an answer, filled; empty: it has none, or the budget has no room for its leads."""
        template = answer.sampling.draft_template
        if template is None:
            return ""
        try:
            check_template(answer, template)
        except RequestError:  # the answer is decoded without a draft
            return ""
        prompt = [*answer.prompt, *self._codec.encode_exactly(template.opening)]
        drafted = Proxied(answer.upstream, answer.codec, prompt, answer.limit, answer.sampling)
        await exhaust(template_events(drafted, template, in_order=True))
        answer.requests += drafted.requests
        return drafted.text

    async def _read(
        self,
        prompt: list[int],
        limit: int,
        answer: Proxied,
        echo: bool = False,
        bias: Mapping[int, float] | None = None,
    ) -> list[ReadToken]:
        """Count and send a request (`Upstream.read`)."""
        answer.requests += 1
        return await answer.upstream.read(prompt, limit, ALTERNATIVES, echo, bias)

    async def _choose(
        self, mask: np.ndarray, likeliest: Mapping[int, float], prompt: list[int], answer: Proxied
    ) -> int:
        """Return the likeliest permitted token behind a prompt.

        Args:
            mask: permitted tokens, uint32 [W].
            likeliest: log probabilities of the likeliest tokens, and perhaps of another one.
            prompt: token ids.
            answer: state of the answer, which counts requests.
        """
        permitted = tokens_of(mask)
        if permitted.size == 1:
            return int(permitted[0])
        best = sorted(likeliest, key=lambda token: -likeliest[token])[:ALTERNATIVES]
        if (chosen := next((token for token in best if permits(mask, token)), None)) is not None:
            return chosen
        (read,) = await self._read(prompt, 1, answer, bias={int(token): BIAS for token in permitted})
        if not permits(mask, read.token):
            raise UpstreamError(f"{answer.upstream.config.url}: expected a token that logit_bias prefers, got another")
        return read.token
