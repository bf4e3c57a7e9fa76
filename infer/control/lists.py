"""Controller of lists that a model writes by itself: leads first, then all bodies in parallel (protocol, section 5).

Where serial text begins a list, the model writes the leads of the further items on a scratch line, which is hidden
afterwards. Every item is a branch that sees its own lead only. The finished items are fed in reading order, one after
the other. Behind each of them the model chooses whether the list goes on; where it does not, the list ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aspd_jax.blocks.checks import asked_for
from aspd_jax.lists import (
    CLAUSE_WORDS,
    CLOSER,
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
from aspd_jax.tokens import BlockIds, ItemIds, SerialIds, TextCodec
from infer.answers.answer import RequestOutput
from infer.control.controller import Controller
from infer.control.masks import token_bits
from infer.control.tags import text_rule
from infer.decode.checking import Check
from infer.decode.guidance import RowGuidance, SerialRule
from infer.decode.state import LENGTH, RUNNING, STOP, EngineConfig
from infer.decode.token_classes import ANY_TEXT, END, IN_LINE, ITEM, LINE_START, LINES, MARK, OPENER, TokenClasses
from infer.request import Request

MARKS = LINES | 1 << MARK | 1 << OPENER
SCRATCH = SerialRule(ANY_TEXT)  # leads end neither the answer nor the sequence


@dataclass
class Item:
    """An item of a list that is decoded in parallel.

    Attributes:
        lead: its lead.
        head: tokens of its marker and lead.
        body: text behind the lead, as far as later tokens cannot change it.
        shown: tokens of head and body, as far as they are in `body`.
        gap: white space that followed the body.
        growing: whether further tokens belong to the body.
        live: whether the branch samples tokens.
        left: tokens after which it waits again; 0: it waits at the beginning of a line.
        cut: whether `max_branch_tokens` or a budget ended its body.
        final: tokens in the finished list, with the separator behind the item; empty: they are not known.
    """

    lead: str
    head: list[int]
    body: str = ""
    shown: list[int] = field(default_factory=list)
    gap: str = ""
    growing: bool = True
    live: bool = True
    left: int = 0
    cut: bool = False
    final: list[int] = field(default_factory=list)


@dataclass
class OpenList:
    """A list under way.

    Attributes:
        outline: its leads.
        before: tokens of serial text before it.
        first: tokens that the model wrote of the first item.
        start: number of serial tokens before the lead under way.
        items: its items; empty: leads are being written.
        joined: tokens of the finished list as far as the budgets have room for whole items; empty: bodies are growing.
        ends: number of tokens of `joined` behind each item, and 0.
        fed: tokens of `joined` that are in serial text, in reading order.
    """

    outline: Outline
    before: list[int]
    first: list[int]
    start: int = 0
    items: list[Item] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    fed: int = 0

    @property
    def form(self) -> ListForm:
        """Return the form of its items."""
        return self.outline.form

    @property
    def checked(self) -> int:
        """Return the number of items that have been fed in reading order."""
        return sum(0 < end <= self.fed for end in self.ends)

    @property
    def is_joined(self) -> bool:
        """Return whether all bodies have ended."""
        return bool(self.items and self.items[0].final)


class Lists(Controller):
    """Decisions for answers whose lists are decoded in parallel.

    Args:
        request: request in adaptive mode, of a model without tags.
        codec: codec of the tokenizer, whose tokens have bytes of their own.
        classes: classes and properties of the tokens.
        config: configuration of the engine.
        max_checked: maximum tokens of a pass that feeds finished items.
    """

    def __init__(
        self, request: Request, codec: TextCodec, classes: TokenClasses, config: EngineConfig, max_checked: int
    ) -> None:
        self._request, self._codec, self._classes, self._config = request, codec, classes, config
        self._max_checked = max_checked
        self._asked = asked_for(request.messages)
        self._detector = ListDetector(request.messages)
        self._items: list[ItemIds] = []  # finished serial texts and lists
        self._after = 0  # serial tokens that `_items` hold
        self._list: OpenList | None = None
        self._line: int | None = None  # serial tokens before a line that may begin a list
        self._hidden = 0  # sampled tokens that are no part of the answer
        self._cut = False  # whether an item of a finished list is cut
        self._ends = config.ends
        self._base = 0  # position of the first token of the answer

    def start(self) -> RowGuidance:
        """Return the decisions before the prompt is fed: the sequence waits where a line may begin an item."""
        return RowGuidance(stops={0: 1 << ITEM})

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output with its lists as blocks."""
        serial, end = output.serial_ids, list[int]()
        if output.finish == STOP and serial and serial[-1] in self._config.end:
            serial, end = serial[:-1], serial[-1:]
        ended = bool(end) or output.finish == LENGTH  # not by a stop string, which may be in a body that is not checked
        if self._list is not None and self._list.is_joined:
            self._read_check(self._list, serial)
            if ended and self._list.checked:
                self._end_list(self._list, complete=bool(end))
        if self._list is None:
            shown = serial if self._line is None or output.finish != RUNNING else serial[: self._line]
            items, growing = [*self._items, SerialIds(shown[self._after :])], frozenset[int]()
        else:
            bodies = output.branch_ids if output.finish == RUNNING else ()
            for number, (item, ids) in enumerate(zip(self._list.items, bodies, strict=False), 1):
                if item.growing:
                    self._read_body(self._list.form, item, ids, number in output.exhausted)
            items, growing = self._with_list(self._list, serial)
        return replace(output, items=items, end=end, open_branches=growing, discarded=self._hidden, cut=self._cut)

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return what follows the last tokens of a sequence that waits."""
        serial = output.serial_ids
        if self._list is None:
            return self._follow_text(serial, output)
        if self._list.is_joined:
            return self._follow_check(self._list, serial, output)
        if self._list.items:
            return self._follow_bodies(self._list, output)
        return self._follow_lead(self._list, serial, output)

    # Serial text

    def _follow_text(self, serial: list[int], output: RequestOutput) -> RowGuidance:
        """Look for the beginning of a list."""
        self._base = output.position + 1 - len(serial)
        text = self._codec.decode(serial)
        begun, self._line = self._detector.look(text), None
        if begun is None:
            return self._text()
        if begun.lead is None:
            size = self._tokens_before(serial, begun.place)
            if len(serial) - size > MAX_LEAD_TOKENS:
                return self._text()
            self._line = size
            left = self._until_lead(text[begun.place :], serial) if begun.begins else 1
            return RowGuidance(left={0: left}, stops={0: MARKS})
        return self._begin_list(serial, text, begun.place, begun.lead, output)

    def _text(self) -> RowGuidance:
        """Let serial text go on to the next line that may begin an item."""
        return RowGuidance({0: ()}, stops={0: 1 << ITEM}, serial=text_rule(forks=False))

    def _tokens_before(self, serial: Sequence[int], place: int) -> int:
        """Return the number of tokens that end in the first `place` characters of serial text."""
        size = len(serial)
        while size and len(self._codec.decode(serial[:size])) > place:
            size -= 1
        return size

    # Leads

    def _begin_list(self, serial: list[int], text: str, place: int, lead: Lead, output: RequestOutput) -> RowGuidance:
        """Begin a list on a scratch line: its first lead with an ellipsis, and the marker of the next item."""
        size = self._tokens_before(serial, place)
        rest = self._encode(text[len(self._codec.decode(serial[:size])) : place])
        before = [*serial[:size], *rest]
        most = min(self._most, self._left(len(before)) // RESERVE)
        first = self._encode(text[place:]) if rest else serial[size:]
        opened = OpenList(Outline(lead, most), before, first)
        if self._left(len(before)) < MIN_ITEMS * RESERVE + MAX_LEAD_TOKENS:
            return self._text()
        self._list, self._hidden = opened, self._hidden + len(serial) - size
        scratch = self._encode(lead.form.shown(0, lead.text)) + self._next_marker(opened)
        opened.start = len(before) + len(scratch)
        return self._scratch(opened, size, [*rest, *scratch], output)

    def _follow_lead(self, opened: OpenList, serial: list[int], output: RequestOutput) -> RowGuidance:
        """Let the model write a lead, and begin the next one behind it."""
        written = serial[opened.start :]
        text = self._codec.decode(serial)[len(self._codec.decode(serial[: opened.start])) :]
        lead = next_lead(opened.form, text)
        if lead is None and len(written) < MAX_LEAD_TOKENS and self._left(len(serial)) > 1:
            left = min(self._until_lead(text, serial), MAX_LEAD_TOKENS - len(written))
            return RowGuidance({0: ()}, {0: left}, {0: MARKS}, serial=SCRATCH)
        self._hidden += len(written)
        outline, number = opened.outline, len(opened.outline.leads)
        if not outline.take(lead, written[0] if written else -1):
            return self._fork(opened, output)
        if outline.barred:
            last = opened.start - 1  # fed again: the next token is sampled after it
            return self._scratch(opened, last, serial[last : opened.start], output)
        marker = outline.form.marker(number).rstrip(" ")
        rest = outline.form.shown(number, outline.leads[-1])[len(marker) :]
        known = self._encode(rest) + self._next_marker(opened)
        begin, opened.start = opened.start, opened.start + len(known)
        if self._left(begin) > len(known) + MAX_LEAD_TOKENS:
            return self._scratch(opened, begin, known, output)
        return self._fork(opened, output)

    def _until_lead(self, text: str, serial: Sequence[int]) -> int:
        """Return the tokens without a punctuation mark after which the lead that a text begins may have ended."""
        marked = int(self._classes.kind[serial[-1]]) in (MARK, OPENER)  # what a mark ends depends on what follows it
        return 1 if marked else max(1, CLAUSE_WORDS - len(text.split()))

    @property
    def _most(self) -> int:
        """Return the maximum items of a list."""
        return min(self._asked or MAX_ITEMS, self._config.max_branches)

    def _next_marker(self, opened: OpenList) -> list[int]:
        """Return the tokens between two leads: a space at the end of the marker belongs to the lead."""
        return self._encode(opened.form.separator + opened.form.marker(len(opened.outline.leads)).rstrip(" "))

    def _scratch(self, opened: OpenList, size: int, known: Sequence[int], output: RequestOutput) -> RowGuidance:
        """Feed known text behind the first `size` serial tokens, and let the model write a lead behind it."""
        allowed = ((IN_LINE >> self._classes.kind.astype(np.int32)) & 1 > 0) & ~self._classes.marker
        allowed[opened.outline.barred] = False
        mask = token_bits(allowed, -(-allowed.size // 32))
        guidance = RowGuidance({0: [mask]}, {0: CLAUSE_WORDS}, {0: MARKS}, serial=SCRATCH)
        return self._resumed(guidance, size, output, known)

    # Bodies

    def _fork(self, opened: OpenList, output: RequestOutput) -> RowGuidance:
        """Begin a branch for each item; a list that should not fork goes on serially."""
        form, leads, before = opened.form, opened.outline.leads, self._codec.decode(opened.before)
        heads = [self._encode(form.item(number, lead)) for number, lead in enumerate(leads)]
        opened.items = [Item(lead, head, shown=head) for lead, head in zip(leads, heads, strict=True)]
        too_long = max(map(len, heads)) > self._config.longest_head
        few = len(leads) < min(MIN_ITEMS, self._most)
        if few or too_long or fork_refusal(self._request.messages, form, leads, before=before):
            self._list = None
            self._detector.pass_over(form)
            return self._resumed(self._text(), len(opened.before), output, opened.first)
        known, sizes = dict(enumerate(heads, 1)), list(map(len, heads))
        guidance = RowGuidance(
            {0: ()},
            stops=dict.fromkeys(known, 1 << LINE_START | 1 << END),
            known_tokens=known,
            counted=False,
            leads=sizes,
            serial=text_rule(forks=False),
            branches=len(known),
        )
        guidance = self._resumed(guidance, len(opened.before), output)
        return replace(guidance, spent=guidance.spent + sum(sizes))

    def _follow_bodies(self, opened: OpenList, output: RequestOutput) -> RowGuidance:
        """Let bodies go on, and end those that are complete; behind the last one, begin the check."""
        ended = frozenset(n for n, item in enumerate(opened.items, 1) if item.live and not item.growing)
        for number in ended:
            opened.items[number - 1].live = False
        if any(item.live for item in opened.items):
            left = {number: item.left for number, item in enumerate(opened.items, 1) if item.live and item.left}
            return RowGuidance(left=left, closed=ended, emptied=ended)
        self._join(opened)
        return self._feed(opened, 0, output)

    def _read_body(self, form: ListForm, item: Item, ids: list[int], exhausted: bool) -> None:
        """Take the tokens of a branch so far; the device ends branches at their limits with one of `_ends`."""
        ended = bool(ids) and ids[-1] in self._ends
        item.cut = ended and (exhausted or len(ids) - len(item.head) >= self._request.params.max_branch_tokens)
        whole = ids[:-1] if ended else ids
        head = self._codec.decode(item.head)
        text = self._codec.decode(whole)[len(head) :]
        body = body_of(form, text + "\n" * ended)
        item.body = text[: body.end]
        item.gap = body.gap if body.next else ""
        size = len(whole)
        while size > len(item.head) and len(self._codec.decode(whole[:size])) > len(head) + body.end:
            size -= 1
        item.shown = whole[:size]
        item.growing = not (ended or body.next)
        self._hidden += 0 if item.growing else len(ids) - size
        line = text.rpartition("\n")[2]
        item.left = int("\n" in text and len(line) < CLOSER)

    # The check

    def _join(self, opened: OpenList) -> None:
        """Join the items in reading order, as many as the budgets have room for."""
        separator = separator_of(opened.form, [item.gap for item in opened.items])
        for number, item in enumerate(opened.items):
            last = number + 1 == len(opened.items)
            text = opened.form.item(number, item.lead) + item.body + separator * (not last)
            item.final = self._encode(text)
            if opened.ends[-1] + len(item.final) >= self._left(len(opened.before)):
                return
            opened.joined += item.final
            opened.ends.append(len(opened.joined))

    def _check(self, opened: OpenList, begin: int, output: RequestOutput) -> RowGuidance:
        """Feed the joined list from a token on, and let the model choose at each joint whether the list goes on.

        Args:
            opened: the list.
            begin: index of the token in the joined list, which is pending if it has been chosen.
            output: the answer so far.
        """
        joined, serial = opened.joined, output.serial_ids[len(opened.before) :]
        end = min(len(joined), begin + self._max_checked)
        known = [place not in opened.ends for place in range(begin + 1, end + 1)]
        check = Check(joined[begin:end], (), known, joined[end] if end < len(joined) else -1)
        guidance = replace(self._text(), check=check)
        if begin + 1 == len(serial) and serial[begin] == joined[begin]:
            return guidance
        return self._resumed(guidance, len(opened.before) + begin, output, joined[begin : begin + 1])

    def _read_check(self, opened: OpenList, serial: Sequence[int]) -> None:
        """Count the tokens of the joined list that have been fed, up to the first that the model chose instead."""
        pairs = enumerate(zip(serial[len(opened.before) :], opened.joined, strict=False))
        most = min(len(serial) - len(opened.before), len(opened.joined))
        opened.fed = next((place for place, (own, joined) in pairs if own != joined), most)

    def _follow_check(self, opened: OpenList, serial: list[int], output: RequestOutput) -> RowGuidance:
        """Go on with the list as far as the model does; otherwise end it."""
        if len(opened.before) + opened.fed == len(serial):
            return self._check(opened, opened.fed - 1, output)
        piece = self._codec.decode(serial)[len(self._codec.decode(serial[:-1])) :]
        if opened.checked < len(opened.items) and opened.form.goes_on(opened.checked, piece):
            self._hidden += 1
            return self._feed(opened, opened.fed, output)
        self._end_list(opened)
        return self._follow_text(serial, output)

    def _feed(self, opened: OpenList, begin: int, output: RequestOutput) -> RowGuidance:
        """Feed the joined list from a token on; behind its end, the budget ends the answer inside of an item."""
        if begin < len(opened.joined):
            return self._check(opened, begin, output)
        size, item = len(opened.before) + begin, opened.items[opened.checked]
        item.final = item.final[: self._left(size)]
        opened.joined += item.final
        opened.ends.append(len(opened.joined))
        return self._resumed(replace(self._text(), finish=LENGTH), size, output, item.final)

    def _end_list(self, opened: OpenList, complete: bool = False) -> None:
        """Record a list with the items that have been fed; one item is serial text.

        Args:
            opened: the list.
            complete: whether the answer ends behind it, so that nothing is separated from the last item.
        """
        kept = opened.items[: opened.checked]
        self._cut |= any(item.cut for item in kept)
        self._hidden += sum(len(item.shown) for item in opened.items[opened.checked :])
        ids = [item.final for item in kept]
        if complete:
            last = kept[-1]
            ids[-1] = self._encode(opened.form.item(len(kept) - 1, last.lead) + last.body)
        before = opened.before[self._after :]
        if len(kept) > 1:
            self._items += [SerialIds(before), self._block(kept, ids)]
        else:
            self._items += [SerialIds(before), SerialIds(ids[0])]  # apart, for readers of a block that has begun
        self._after = len(opened.before) + sum(len(item.final) for item in kept)
        self._list = self._line = None
        self._detector.pass_over(opened.form)

    def _with_list(self, opened: OpenList, serial: Sequence[int]) -> tuple[list[ItemIds], frozenset[int]]:
        """Return the items of an answer whose last one is a list under way, and the numbers of unchecked branches.

        An item is checked once a token is sampled behind it: an answer that ends there has no separator.
        """
        before = SerialIds(opened.before[self._after :])
        if not opened.items:
            return [*self._items, before], frozenset()
        is_behind = len(serial) > len(opened.before) + opened.fed
        checked = opened.checked - (opened.fed in opened.ends[1:] and not is_behind)
        ids = [item.final if number < checked else item.shown for number, item in enumerate(opened.items)]
        growing = frozenset(range(checked + 1, len(opened.items) + 1))
        return [*self._items, before, self._block(opened.items, ids)], growing

    def _block(self, items: Sequence[Item], ids: Sequence[list[int]]) -> BlockIds:
        titles = tuple(self._encode(item.lead) for item in items)
        return BlockIds(titles, tuple(ids), tuple(map(SerialIds, ids)))

    # Tokens, positions and budgets

    def _encode(self, text: str) -> list[int]:
        return self._codec.byte_tokens.encode(text) if text else []

    def _left(self, size: int) -> int:
        """Return the tokens of the budgets behind `size` serial tokens."""
        return min(self._request.budget, self._request.content_budget) - size

    def _resumed(
        self, guidance: RowGuidance, size: int, output: RequestOutput, text: Sequence[int] = ()
    ) -> RowGuidance:
        """Return decisions that go on behind the first `size` serial tokens, with known text."""
        used, queued = size + len(text), bool(text) and not guidance.finish and len(text) <= self._config.max_queued
        if queued:  # in the next step, without a call of its own
            guidance = replace(guidance, known_tokens={0: text}, counted=False)
        return replace(
            guidance,
            resume_at=self._base + size,
            text=() if queued else text,
            spent=output.tokens_left - (self._request.budget - used),
            content=output.content_left - (self._request.content_budget - used),
        )
