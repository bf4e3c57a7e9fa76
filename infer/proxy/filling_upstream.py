"""Templates on an upstream server: one request for each hole, those of a stage concurrently (protocol, section 5)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from aspd_jax.errors import RequestError
from aspd_jax.grammar_limits import first_line, parser_limits
from aspd_jax.json_schema import read_schema
from aspd_jax.template import Hole, Template, check_literals
from infer.answers.events import Event, FilledReader
from infer.answers.filled import END_TOKENS, Filled, HoleText, hole_text
from infer.proxy.answering import Proxied
from infer.proxy.upstream import UpstreamError
from infer.server.deltas import merged

MAX_BLANKS = 16  # characters of white space before a JSON value


class Progress(NamedTuple):
    """State of a hole that is being filled.

    Attributes:
        name: name of the hole.
        value: its value so far.
        tokens: tokens of the value so far, and of the text after it.
        complete: whether the value has ended.
        final: whether no further request replaces this part of the value.
    """

    name: str
    value: str
    tokens: int
    complete: bool
    final: bool


def check_template(answer: Proxied, template: Template) -> None:
    """Check that a template can be filled.

    Args:
        answer: the answer.
        template: the template.

    Raises:
        RequestError: the tokenizer has no tokens for the literal text, a schema is malformed, or the leads do not
            fit.
    """
    check_literals(template)
    for hole in template.holes:
        if hole.schema is not None:
            try:
                _matcher(hole.schema)
            except RequestError as error:
                raise RequestError(": ".join(filter(None, ["json_schema", hole.name, str(error)]))) from None
    if (needed := _needed(answer, template, template.holes)) > answer.limit:
        raise RequestError(f"template: expected a budget of at least {needed} tokens, got {answer.limit}.")


async def template_events(
    answer: Proxied, template: Template, in_order: bool, constrained: bool = False
) -> AsyncGenerator[Event, None]:
    """Fill a template and yield its events (`infer.answers.events`) without `done`.

    A JSON value is first requested without a constraint. The token that ends a value may contain the text after it. A
    constraint of the value alone forbids this token, and the model continues. The stream is closed where the value
    ends. Only a value that does not fit its schema is requested again with the constraint, as `response_format`.

    Args:
        answer: the answer, whose state is updated; its prompt ends with the literal text before the first block.
        template: the template.
        in_order: whether the text is yielded in reading order.
        constrained: whether values are requested with their constraint at once.

    Raises:
        UpstreamError: the upstream refuses a request, fails, or does not keep to a constraint.
    """
    reader, filled = FilledReader(()), Filled(template, {})
    context, left = list(answer.prompt), answer.limit
    waiting = [hole for stage in template.stages for hole in stage]
    for stage in template.stages:
        waiting, used = waiting[len(stage) :], 0
        spare = left - _needed(answer, template, waiting)
        filled = replace(filled, blocks=(*filled.blocks, tuple(stage)), growing=frozenset(h.name for h in stage))
        texts = [hole_text(template, hole) for hole in stage]
        prompts = [[*context, *answer.codec.text.encode_exactly(text.lead)] for text in texts]
        least = sum(len(ids) - len(context) for ids in prompts)
        sources = [
            _fill(answer, text, ids, spare - least, template.holes.index(text.hole), constrained)
            for text, ids in zip(texts, prompts, strict=True)
        ]
        async with aclosing(_fill_block(filled, sources, least, spare)) as states:
            async for filled, used in states:
                answer.items, answer.tokens = list(filled.structure), answer.limit - left + used
                for event in reader.read(filled, filled.text if in_order else None):
                    yield event
        if filled.growing:
            break
        left -= used
        context += [i for text in texts for i in _encode_branch(answer, text, filled.values[text.hole.name])]
    filled = replace(filled, is_final=True)
    answer.items, answer.finish_reason = list(filled.structure), "length" if filled.growing else "stop"
    for event in reader.read(filled, filled.text if in_order else None):
        yield event


def _needed(answer: Proxied, template: Template, holes: Sequence[Hole]) -> int:
    """Return the tokens that holes need at least."""
    leads = (answer.codec.text.encode_exactly(hole_text(template, hole).lead) for hole in holes)
    return sum(len(lead) + END_TOKENS for lead in leads if lead)


def _encode_branch(answer: Proxied, text: HoleText, value: str) -> list[int]:
    """Return the tokens of a filled hole in the prompt of later holes; objects that its lead opens are closed."""
    closed = "}" * len(text.hole.path)
    return [
        *answer.codec.text.encode_exactly(text.lead),
        *answer.encode(" " * text.spaced + value + closed),
    ]


async def _fill(
    answer: Proxied, text: HoleText, prompt: list[int], limit: int, number: int, constrained: bool
) -> AsyncGenerator[Progress, None]:
    """Request the value of a hole and yield its progress.

    Args:
        answer: the answer.
        text: text around the hole.
        prompt: token ids, lead included.
        limit: maximum tokens.
        number: number of the hole in the order of the text.
        constrained: whether the request has the constraint of the value.
    """
    hole, written, tokens, value = text.hole, "", 0, ""
    check, ended = ValueCheck(hole.schema), ""
    more: dict[str, Any] = {}
    if constrained and hole.schema is not None:  # in OpenAI's form, which vLLM, SGLang and `aspd serve` accept
        schema = {"name": "value", "schema": json.loads(hole.schema)}
        more = {"response_format": {"type": "json_schema", "json_schema": schema}}
    pieces = answer.ask(prompt, limit, more=more, number=2 * number + constrained)
    async with aclosing(pieces):
        async for piece, reason in pieces:
            ended, written = reason or ended, written + piece
            tokens += answer.count(piece)
            value, complete = text.read(written, ended == "stop")
            begins = constrained or hole.schema is None or bool(value) or len(written) <= MAX_BLANKS
            if not (begins and check.follow(value, complete)):
                break
            final = complete or constrained or hole.schema is None or ended == "length"
            yield Progress(hole.name, value, tokens, complete, final)
            if complete or ended == "length":
                return
    if constrained:
        raise UpstreamError(f"{answer.upstream.config.url}: expected a value of {hole.name!r}, got {value[:40]!r}")
    async with aclosing(_fill(answer, text, prompt, limit, number, constrained=True)) as again:
        async for progress in again:
            yield progress


class ValueCheck:
    """Check of a growing JSON value: whether it can become a value of a schema.

    Args:
        schema: the schema as text; None: any text is permitted.
    """

    def __init__(self, schema: str | None) -> None:
        self._matcher = None if schema is None else _matcher(schema)
        self._size = 0

    def follow(self, value: str, complete: bool) -> bool:
        """Return whether the value so far can become one of the schema, or is one if it is complete."""
        if self._matcher is None:
            return True
        new, self._size = value[self._size :], max(self._size, len(value))
        fits = not new or self._matcher.consume_tokens(list(new.encode(errors="replace")))
        return bool(fits and (not complete or self._matcher.is_accepting()))


def _matcher(schema: str) -> Any:
    """Return a new matcher of llguidance of a schema over bytes.

    Raises:
        RequestError: the schema is malformed, or a keyword is not supported.
    """
    from llguidance import LLMatcher, LLTokenizer

    try:
        grammar = LLMatcher.grammar_from_json_schema(read_schema(schema).text)
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits())
    except ValueError as error:
        raise RequestError(str(error)) from None
    if matcher.is_error():
        raise RequestError(first_line(matcher.get_error()))
    return matcher


async def _fill_block(
    filled: Filled, sources: Sequence[AsyncGenerator[Progress, None]], least: int, limit: int
) -> AsyncGenerator[tuple[Filled, int], None]:
    """Yield a template whenever the values of its last block have grown, and the tokens of this block.

    Args:
        filled: the template at the beginning of the block.
        sources: progress of each hole.
        least: tokens of the leads.
        limit: maximum tokens; values that reach it are cut.
    """
    latest = dict[str, Progress]()
    yield filled, least
    async with aclosing(merged(sources)) as news:
        async for progress in news:
            tokens = least + sum(p.tokens for p in {**latest, progress.name: progress}.values())
            if tokens <= limit:
                latest[progress.name] = progress
            growing = filled.growing - {p.name for p in latest.values() if p.complete}
            cut = tokens > limit or (tokens == limit and bool(growing))
            values = {p.name: p.value for p in latest.values() if p.final or cut}
            yield (
                replace(filled, values={**filled.values, **values}, growing=growing),
                least + sum(p.tokens for p in latest.values()),
            )
            if cut:
                return
