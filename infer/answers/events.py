"""Events of an answer while it grows."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from aspd_jax.tokens import BlockIds, Codec, SerialIds, TextStream
from infer.answers.answer import RequestOutput, Result
from infer.answers.filled import Filled
from infer.answers.stop import first_match, repeats_an_object, undecided

Kind = Literal["token", "fork", "branch", "merge", "done"]


@dataclass(frozen=True)
class Event:
    """A change of an answer.

    Attributes:
        kind: `token`: text was added to a segment. `fork`: a block began. `branch`: a branch ended.
            `merge`: a block ended. `done`: the answer ended.
        block: number of the block from 1; 0 in serial text.
        branch: number of the branch from 1; 0 in serial text.
        text: the added text of a `token`, whole characters only; the whole text of a `branch`. A budget may remove the
            end of a branch that is not the first: `result` has the final text.
        token_ids: new tokens of a `token`.
        titles: titles of a `fork`.
        result: answer of `done`, with finish reason and statistics.
    """

    kind: Kind
    block: int = 0
    branch: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    titles: tuple[str, ...] = ()
    result: Result | None = None


class StopFilter:
    """Filter that ends a stream of events in reading order before the first stop string.

    Attributes:
        matched: whether a stop string was found. Afterwards only `done` is returned.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched = False
        self._stop = stop
        self._held: list[Event] = []

    def take(self, events: Sequence[Event], final: bool) -> list[Event]:
        """Return the events that certainly precede a stop string; hold later ones until that is known.

        Args:
            events: new events.
            final: whether no text follows.
        """
        done = [event for event in events if event.kind == "done"]
        if self.matched:
            return done
        self._held += (event for event in events if event.kind != "done")
        text = "".join(event.text for event in self._held if event.kind == "token")
        match = first_match(text, self._stop)
        left = match.start if match else len(text) - (0 if final else undecided(text, self._stop))
        self.matched = match is not None
        passed: list[Event] = []
        while self._held:
            event = self._held[0]
            size = len(event.text) if event.kind == "token" else 0
            if size > left:
                if left:
                    passed.append(replace(event, text=event.text[:left]))
                    self._held[0] = replace(event, text=event.text[left:], token_ids=())
                break
            passed.append(self._held.pop(0))
            left -= size
        return passed + done


@dataclass
class _Segment:
    """Progress of a reader in a segment.

    Attributes:
        stream: decoder of its ids; None: the model has no tokenizer.
        decoded: number of ids that are decoded.
        text: decoded text that no event has.
        searched: characters of `text` that were searched for stop strings.
        tokens, characters: tokens and characters in events.
        ended: whether its end is in events.
    """

    stream: TextStream | None
    text: str
    decoded: int = 0
    searched: int = 0
    tokens: int = 0
    characters: int = 0
    ended: bool = False


class EventReader:
    """Reader of the events of an answer since the last call; its cost does not depend on what was read before.

    Args:
        codec: codec of the model's tokenizer; None: texts are empty.
        stop: strings that end the answer.
        end_at_repeat: see `infer.request.SamplingParams`.
    """

    def __init__(self, codec: Codec | None, stop: Sequence[str], end_at_repeat: str | None = None) -> None:
        self._codec, self._stop = codec, stop
        self._filter = StopFilter(stop)
        self._before = None if end_at_repeat is None else re.compile(end_at_repeat)
        self._repeats, self._so_far = False, ""
        self._place, self._blocks = 0, 0  # items and blocks whose events are complete
        self._segments: dict[int, _Segment] = {}  # segments of the next item, by branch
        self._forked = False  # whether the next item is a block with a `fork`

    @property
    def stopped(self) -> bool:
        """Return whether the answer contains a stop string or repeats an object."""
        return self._filter.matched or self._repeats

    def collect_events(self, output: RequestOutput, result: Result | None, in_order: bool) -> list[Event]:
        """Return the new events.

        Args:
            output: the answer as far as it is decoded.
            result: the answer, if it has ended.
            in_order: make the events of a branch when all branches before it have ended, so that texts come in reading
                order. With stop strings this is always the case.
        """
        events: list[Event] = []
        in_order = in_order or bool(self._stop)
        for number in range(self._place, len(output.items)):
            item, last = output.items[number], number + 1 == len(output.items) and result is None
            if isinstance(item, SerialIds) and self._forked:  # of the list that began, one item is left
                events += [*self._read(1, item, growing=False), Event("merge", self._blocks + 1)]
                complete = True
            elif isinstance(item, SerialIds):
                events += self._read(0, item, growing=last)
                complete = not last
            else:
                growing = output.open_branches if last else frozenset()
                events += self._read_block(item, growing, in_order)
                complete = not growing
            if complete:
                self._place, self._blocks = number + 1, self._blocks + self._forked
                self._segments, self._forked = {}, False
        if self._before is not None and events:
            self._so_far += "".join(event.text for event in events if event.kind == "token")
            self._repeats = repeats_an_object(self._so_far, self._before)
        if result is not None:
            events.append(Event("done", result=result))
        return self._filter.take(events, result is not None) if self._stop else events

    def branches_past_stop(self, output: RequestOutput) -> list[int]:
        """Return the open branches after the first match, and the branch of the match; numbers from 1.

        The first open branch is left out: `stopped` is true when its text contains a stop string.
        """
        if not self._stop or not output.open_branches or self._codec is None:
            return []
        first, longest = min(output.open_branches), max(map(len, self._stop))
        for branch, text in enumerate(output.block.texts, 1):
            if branch <= first:
                continue
            segment = self._decoded(branch, text)
            if first_match(segment.text[max(0, segment.searched - longest) :], self._stop):
                return [other for other in sorted(output.open_branches) if other >= branch]
            segment.searched = len(segment.text)
        return []

    def _read_block(self, item: BlockIds, growing: Collection[int], in_order: bool) -> list[Event]:
        """Return the new events of a block; `growing`: branches that are open."""
        events, block = [], self._blocks + 1
        if not self._forked:
            self._forked = True
            events.append(Event("fork", block, titles=tuple(map(self._title, item.titles))))
        for branch, text in enumerate(item.texts, 1):
            events += self._read(branch, text, branch in growing)
            if in_order and branch in growing:
                break
        return events if growing else [*events, Event("merge", block)]

    def _read(self, branch: int, ids: SerialIds, growing: bool) -> list[Event]:
        """Return the new events of a segment; `branch`: 0 is serial text."""
        segment = self._decoded(branch, ids)
        if segment.ended:
            return []
        if growing:
            text, segment.text = segment.text, ""
        else:
            whole = "" if self._codec is None else self._codec.text.text_of(ids)
            text = whole[segment.characters :]
        tokens = (*ids.lead[segment.tokens :], *ids.ids[max(0, segment.tokens - len(ids.lead)) :])
        segment.tokens, segment.characters = segment.tokens + len(tokens), segment.characters + len(text)
        segment.ended = not growing
        block = self._blocks + 1 if branch else 0
        events = [Event("token", block, branch, text=text, token_ids=tokens)] if text or tokens else []
        return [*events, Event("branch", block, branch, text=whole)] if branch and not growing else events

    def _decoded(self, branch: int, ids: SerialIds) -> _Segment:
        """Return a segment of the next item, its tokens decoded as far as later ones cannot change their text."""
        codec = None if self._codec is None else self._codec.text
        if branch not in self._segments:
            lead = codec.decode(ids.lead) if codec and ids.lead else ""
            self._segments[branch] = _Segment(None if codec is None else codec.stream(), lead)
        segment, new = self._segments[branch], ids.ids[self._segments[branch].decoded :]
        if segment.stream is not None:
            segment.text += segment.stream.decode(new)
        segment.decoded += len(new)
        return segment

    def _title(self, ids: list[int]) -> str:
        return "" if self._codec is None else self._codec.text.shown(ids)


class FilledReader:
    """Reader of the events of a template since the last call, in place of `EventReader`.

    Args:
        stop: strings that end the answer.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._filter = stop, StopFilter(stop)
        self._text = ""
        self._shown: dict[tuple[int, int], str] = {}  # (block, branch) -> text in events
        self._ended: set[tuple[int, int]] = set()  # a branch, or with branch 0 a block

    @property
    def stopped(self) -> bool:
        """Return whether the answer contains a stop string."""
        return self._filter.matched

    def branches_past_stop(self, output: RequestOutput) -> list[int]:
        """Return no branch: all are filled until a stop string is found in reading order."""
        return []

    def collect_events(self, output: RequestOutput, result: Result | None, in_order: bool) -> list[Event]:
        """Return the new events (`EventReader.collect_events`)."""
        events: list[Event] = []
        if output.template is not None:
            text = output.template.text if result is None or self._stop else result.text
            events = self.read(output.template, text) if in_order or self._stop else self.read(output.template)
        if result is not None:
            events.append(Event("done", result=result))
        return self._filter.take(events, result is not None) if self._stop else events

    def read(self, state: Filled, text: str | None = None) -> list[Event]:
        """Return the new events of a template.

        Args:
            state: the template as far as it is filled.
            text: its text so far, for events in reading order; None: events of all branches as they grow.
        """
        events: list[Event] = []
        if text is not None:
            new, self._text = text[len(self._text) :], max(self._text, text, key=len)  # shorter after a retry
            return [Event("token", text=new)] if new else []
        if state.blocks and not self._shown and state.template.opening:
            events.append(Event("token", text=state.template.opening))
        for number, block in enumerate(state.blocks, 1):
            if (number, 0) in self._ended:
                continue
            if (number, 1) not in self._shown:
                events.append(Event("fork", number, titles=tuple(hole.name for hole in block)))
            for branch, hole in enumerate(block, 1):
                key, before = (number, branch), self._shown.get((number, branch), "")
                text = state.template.lead(hole) + state.values.get(hole.name, "")
                self._shown[key] = max(before, text, key=len)
                if len(text) > len(before):
                    events.append(Event("token", number, branch, text=text[len(before) :]))
                if key not in self._ended and hole.name not in state.growing:
                    self._ended.add(key)
                    events.append(Event("branch", number, branch, text=text))
            if number < len(state.blocks) or not state.growing:
                self._ended.add((number, 0))
                events.append(Event("merge", number))
        following = state.template.following(state.template.holes[-1])
        if state.is_final and not state.growing and following:
            events.append(Event("token", text=following))
        return events
