"""Answers of templates while they are filled: their values, text and structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from aspd_jax.fields import value_length
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, canonical
from aspd_jax.template import Hole, Template
from aspd_jax.tokens import TextCodec
from infer.answers.stop import undecided

WHITE = " \t\r\n"
END_TOKENS = 2  # minimum tokens reserved for a hole: one, and its end


class HoleText(NamedTuple):
    """Text around a hole in the model's context.

    Attributes:
        hole: the hole.
        lead: text before the value.
        stop: text that ends free text; empty: end of text alone does.
        spaced: whether the literal text before the value ends with a space, which the model writes with the value.
    """

    hole: Hole
    lead: str
    stop: str
    spaced: bool

    def read(self, text: str, final: bool) -> tuple[str, bool]:
        """Read the value from the text after the lead.

        Args:
            text: the text so far.
            final: whether no text follows.

        Returns:
            The value, of a growing one the part that later text cannot change, and whether it is complete.
        """
        if self.hole.schema is not None:
            size = value_length(text + " " * final)
            return text[:size].strip(WHITE), size is not None
        text = text.removeprefix(" ") if self.spaced else text
        if self.stop and (at := text.find(self.stop)) >= 0:
            return text[:at], True
        return text[: len(text) - (0 if final else undecided(text, [self.stop]))], final


class FilledBranch(NamedTuple):
    """A branch of a filled template.

    Attributes:
        text: text around the hole.
        lead, rest: places of the tokens of the lead, and of those behind it, in `Result.token_ids`.
        value: text of the value, as far as the answer has it.
        complete: whether the value is whole.
    """

    text: HoleText
    lead: range
    rest: range
    value: str
    complete: bool


def filled_branches(
    template: Template, answer: str, ids: Sequence[int], sizes: Sequence[int], codec: TextCodec
) -> list[FilledBranch]:
    """Return the branches of a filled template in the order of its text, up to the end of the answer.

    Args:
        template: the template.
        answer: text of the answer.
        ids: tokens of all branches, in the order of their blocks.
        sizes: number of tokens of each branch.
        codec: codec of the tokenizer.
    """
    names = [hole.name for stage in template.stages for hole in stage]
    places = {name: range(end - size, end) for name, size, end in zip(names, sizes, accumulate(sizes), strict=False)}
    branches, at = list[FilledBranch](), 0
    for part in template.parts:
        if isinstance(part, str):
            at += len(part)
            continue
        if part.name not in places or (branches and at - len(template.lead(part)) >= len(answer)):
            break
        own, text = places[part.name], hole_text(template, part)
        size = len(codec.encode_exactly(text.lead))
        lead, rest = own[:size], own[size:]
        value, complete = text.read(codec.decode(ids[rest.start : rest.stop]), True)
        branches.append(FilledBranch(text, lead, rest, value, complete and at + len(value) <= len(answer)))
        at += len(value)
    return branches


def hole_text(template: Template, hole: Hole) -> HoleText:
    """Return the text around a hole of a template."""
    context = template.lead(hole) if hole.context is None else hole.context
    lead = context.rstrip(" ") or context
    following = template.following(hole)
    return HoleText(hole, lead, following.rstrip() or following, lead != context)


@dataclass(frozen=True)
class Filled:
    """A template as far as it is filled.

    Attributes:
        template: the template.
        values: values by name; of holes that grow, what later tokens cannot change.
        blocks: blocks that have begun: their holes, in the order of the branches.
        growing: names of the holes of the last block whose values are not complete.
        is_final: whether the answer has ended.
    """

    template: Template
    values: Mapping[str, str]
    blocks: tuple[tuple[Hole, ...], ...] = ()
    growing: frozenset[str] = frozenset()
    is_final: bool = False

    @property
    def text(self) -> str:
        """Return the text in reading order, up to the part that is not known yet."""
        complete = {name: value for name, value in self.values.items() if name not in self.growing}
        first = next((hole.name for hole in self.template.holes if hole.name not in complete), None)
        return self.template.fill(complete) + ("" if first is None else self.values.get(first, ""))

    @property
    def structure(self) -> Structure:
        """Return the answer as serial text and blocks, in reading order; literal text precedes each value.

        While the answer grows, all branches that have begun are included; afterwards none after the first value that is
        not complete, also if its block has not begun.
        """
        template = self.template
        numbers = {hole.name: number for number, block in enumerate(self.blocks) for hole in block}
        cut = next((n for n, hole in enumerate(template.holes) if not self._complete(hole)), len(template.holes))
        read = template.holes[: cut + 1] if self.is_final else template.holes
        begun = [hole for hole in read if hole.name in numbers]
        items: list[Item] = [Serial(template.opening)]
        for _, group in groupby(begun, key=lambda hole: numbers[hole.name]):
            branches = [Branch(h.name or '""', template.lead(h) + self.values.get(h.name, "")) for h in group]
            items.append(Parallel(branches) if len(branches) > 1 else Serial(branches[0].text))
        if cut == len(template.holes):
            items.append(Serial(template.following(template.holes[-1])))
        return canonical(items)

    def _complete(self, hole: Hole) -> bool:
        return hole.name in self.values and hole.name not in self.growing
