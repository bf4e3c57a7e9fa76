"""Structure as character spans over an unchanged answer (protocol, section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aspd_jax.blocks.titles import titles_of
from aspd_jax.errors import StructureError
from aspd_jax.layout import Titles
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure


@dataclass(frozen=True)
class BranchSpan:
    """One branch of an answer.

    Attributes:
        title: name of the branch, for checks and messages.
        start, end: range of characters, `answer[start:end]`.
        lead: number of characters of its lead (protocol, section 2); 0: the title is a name.
    """

    title: str
    start: int
    end: int
    lead: int = 0


@dataclass(frozen=True)
class BlockSpan:
    """A block of an answer.

    Attributes:
        branches: two or more branches; each starts where the one before ends.
    """

    branches: tuple[BranchSpan, ...]

    @property
    def start(self) -> int:
        """Return the offset of the first character."""
        return self.branches[0].start

    @property
    def end(self) -> int:
        """Return the offset after the last character."""
        return self.branches[-1].end


def lead_of(answer: str, branch: BranchSpan) -> str:
    """Return the lead of a branch; empty if its title is a name."""
    return answer[branch.start : branch.start + branch.lead]


def structure_of(answer: str, blocks: Sequence[BlockSpan]) -> Structure:
    """Return the structured answer; its plain text is always the answer.

    Raises:
        StructureError: spans overlap, leave gaps within a block, are empty, or are outside the answer.
    """
    items: list[Item] = []
    place = 0
    for block in blocks:
        if block.start < place:
            raise StructureError(f"a block begins at character {block.start}, inside the block before it")
        if place < block.start:
            items.append(Serial(answer[place : block.start]))
        place = block.start
        branches = []
        for branch in block.branches:
            if branch.start != place or not branch.start < branch.end <= len(answer):
                raise StructureError(
                    f"branch {branch.title!r}: expected one or more characters from {place} on, "
                    f"got {branch.start} to {branch.end} of {len(answer)}"
                )
            branches.append(Branch(lead_of(answer, branch) or branch.title, answer[branch.start : branch.end]))
            place = branch.end
        items.append(Parallel(branches))
    if place < len(answer):
        items.append(Serial(answer[place:]))
    return tuple(items)


def spans_of(items: Sequence[Item], titles: Titles = "leads") -> tuple[BlockSpan, ...]:
    """Return the spans of a structured answer over its plain text.

    Args:
        items: the answer.
        titles: form of its titles.
    """
    blocks, place = [], 0
    for item in items:
        if isinstance(item, Serial):
            place += len(item.text)
            continue
        branches = []
        for branch in item.branches:
            title, lead = branch.title, 0
            if titles == "leads":
                title, lead = titles_of([title])[0] or title.strip(), len(title)
            branches.append(BranchSpan(title, place, place + len(branch.text), lead))
            place += len(branch.text)
        blocks.append(BlockSpan(tuple(branches)))
    return tuple(blocks)
