"""Lists of any chat model on an upstream server, decoded in parallel without training (protocol, section 5)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from aspd_jax.blocks.checks import asked_for
from aspd_jax.lists import (
    MAX_ITEMS,
    MAX_LEAD_TOKENS,
    MIN_ITEMS,
    RESERVE,
    Lead,
    ListDetector,
    ListForm,
    Outline,
    body_of,
    fork_refusal,
    next_lead,
    separator_of,
)
from aspd_jax.structure import Branch, Parallel, Serial
from infer.answers.events import Event
from infer.proxy.answering import Proxied, exhaust
from infer.server.deltas import merged


async def list_events(answer: Proxied, messages: Sequence[str]) -> AsyncGenerator[Event, None]:
    """Decode an answer and yield its events (`infer.answers.events`) without `done`, in reading order.

    Leads, bodies and joints are ordinary requests with a common prefix: one for each lead, one for each body, all at
    once, and one token for each joint, all at once.

    Args:
        answer: the answer, whose state is updated.
        messages: the messages before the answer.

    Raises:
        UpstreamError: the upstream refuses a request or fails.
    """
    detector, most, text, block = ListDetector(messages), asked_for(messages) or MAX_ITEMS, "", 0
    while True:
        start = shown = len(text)
        answer.items.append(Serial(""))
        ended, begun = None, None
        if (left := answer.limit - answer.count(text)) <= 0:
            answer.finish_reason = "length"
            return
        async with aclosing(_ask(answer, text, left)) as pieces:
            async for piece, reason in pieces:
                unread = len(text) + len(piece)
                for part in piece.splitlines(keepends=True):  # the detector looks at every line
                    text += part
                    begun = detector.look(text)
                    if begun is not None and begun.lead is not None:
                        break
                ended = reason or ended if len(text) == unread else None  # the rest is asked for again
                safe = len(text) if begun is None else begun.place
                if safe > shown:
                    answer.items[-1] = Serial(text[start:safe])
                    yield Event("token", text=text[shown:safe])
                    shown = safe
                if begun is not None and begun.lead is not None:
                    break
        if begun is None or begun.lead is None:
            if len(text) > shown:
                answer.items[-1] = Serial(text[start:])
                yield Event("token", text=text[shown:])
            answer.finish_reason = ended or "stop"
            return
        before, form = text[: begun.place], begun.lead.form
        left = answer.limit - answer.count(before)
        leads = await _leads(answer, before, begun.lead, min(most, left // RESERVE))
        if len(leads) < min(MIN_ITEMS, most) or fork_refusal(messages, form, leads, before=before):
            detector.pass_over(form)
            answer.items[-1] = Serial(text[start:])
            yield Event("token", text=text[shown:])
            if ended:
                answer.finish_reason = ended
                return
            continue
        heads = [form.item(number, lead) for number, lead in enumerate(leads)]
        items, separator = await _bodies(answer, before, form, heads, left)
        kept, over = await _kept(answer, before, form, items, separator)
        detector.pass_over(form)
        goes_on = len(kept) < len(items) and not over
        texts = [f"{item}{separator}" for item in kept[:-1]] + [kept[-1] + separator * goes_on]
        texts, cut = _within(answer, texts, left)
        text = before + "".join(texts)
        if len(texts) == 1:  # one item makes no block
            answer.items[-1] = Serial(text[start:])
            yield Event("token", text=text[shown:])
        else:
            block += 1
            yield Event("fork", block=block, titles=tuple(leads[: len(texts)]))
            answer.items.append(Parallel([Branch(*pair) for pair in zip(leads, texts, strict=False)]))
            for number, item in enumerate(texts, 1):
                yield Event("token", block, number, item)
                yield Event("branch", block, number, item)
            yield Event("merge", block=block)
        if cut or over:
            answer.finish_reason = "length" if cut else "stop"
            return


def _ask(
    answer: Proxied, text: str, limit: int, barred: Sequence[int] = ()
) -> AsyncGenerator[tuple[str, str | None], None]:
    """Send a request that continues an answer."""
    return answer.ask([*answer.prompt, *answer.encode(text)], limit, forbidden=barred)


def _within(answer: Proxied, texts: Sequence[str], left: int) -> tuple[list[str], bool]:
    """Return the texts up to `left` tokens in all, and whether they were cut."""
    kept = list[str]()
    for text in texts:
        ids = answer.encode(text)
        if len(ids) >= left:
            return [*kept, answer.codec.text.decode(ids[:left])], True
        kept.append(text)
        left -= len(ids)
    return kept, False


async def _leads(answer: Proxied, before: str, first: Lead, most: int) -> list[str]:
    """Let the model write the leads of the further items on a line that the reader does not see."""
    outline, form, scratch = Outline(first, most), first.form, before + first.form.shown(0, first.text)
    goes_on = most > 1
    while goes_on:
        number, written, lead = len(outline.leads), "", None
        line = scratch + form.separator + form.marker(number).rstrip(" ")
        async with aclosing(_ask(answer, line, MAX_LEAD_TOKENS, outline.barred)) as pieces:
            async for piece, _ in pieces:
                written += piece
                if (lead := next_lead(form, written)) is not None:
                    break
        goes_on = outline.take(lead, next(iter(answer.encode(written)), -1))
        if len(outline.leads) > number:
            scratch += form.separator + form.shown(number, outline.leads[-1])
    return outline.leads


async def _bodies(
    answer: Proxied, before: str, form: ListForm, heads: Sequence[str], left: int
) -> tuple[list[str], str]:
    """Decode all bodies at once; return the items, and the text between two of them."""
    items, gaps = list(heads), list[str]()

    async def grow(number: int, head: str) -> AsyncGenerator[None, None]:
        written = ""
        async with aclosing(_ask(answer, before + head, left)) as pieces:
            async for piece, reason in pieces:
                written += piece
                body = body_of(form, written + "\n" * (reason == "stop"))
                items[number] = head + written[: body.end]
                if body.next:
                    gaps.append(body.gap)
                    break
        yield

    await exhaust(merged([grow(*pair) for pair in enumerate(heads)]))
    return items, separator_of(form, gaps)


async def _kept(
    answer: Proxied, before: str, form: ListForm, items: Sequence[str], separator: str
) -> tuple[list[str], bool]:
    """Return the items up to the first joint at which the model does not go on, and whether it ends the answer."""
    goes_on, over = [False] * len(items), [False] * len(items)

    async def look(joint: int) -> AsyncGenerator[None, None]:
        joined = before + "".join(item + separator for item in items[:joint])
        async with aclosing(_ask(answer, joined, 1)) as pieces:
            async for piece, reason in pieces:
                goes_on[joint] |= form.goes_on(joint, piece)
                over[joint] |= reason == "stop"
        yield

    await exhaust(merged([look(joint) for joint in range(1, len(items))]))
    joint = next((joint for joint in range(1, len(items)) if not goes_on[joint]), 0)
    return (list(items[:joint]), over[joint]) if joint else (list(items), False)
