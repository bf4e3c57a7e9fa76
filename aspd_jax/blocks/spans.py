r"""Structure as character spans over an unchanged answer, and the leads of branches (protocol, section 7).

A lead is the beginning of a part, which a model writes before the block. It has the white space before its part, the
marker, and the words that tell the part from others, with the punctuation and the marks of emphasis behind them:
`\n\n2. **Eat well**:`. The parts of an answer that are cut in this way join to its text, whatever the branches write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aspd_jax.blocks.markers import BOLD, marker_of
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.titles import FIRST_WORDS, WORD, titles_of
from aspd_jax.errors import StructureError
from aspd_jax.layout import Titles
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure

FAR = 8  # maximum characters of emphasis and blanks between a marker and its title
MAX_BOLD = 120  # maximum characters of a bold lead
# What may follow the words of a lead: emphasis, punctuation, emphasis, a dash.
_CLOSING = re.compile(r"[*_`\"”’」)\]]*[:：.!?。！？]?[*_`\"”’」)\]]*(?:[ \t]*[-–—](?=\s))?")


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
            text = answer[branch.start : branch.end]
            branches.append(Branch(text[: branch.lead] or branch.title, text))
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


def with_leads(answer: str, block: BlockSpan) -> BlockSpan:
    """Return a block whose branches begin with the white space before them, and have leads.

    A lead that would end within code, a formula or an element (`aspd_jax.blocks.regions`) ends behind it.

    Raises:
        StructureError: a lead is no longer than the white space and the marker of its part, or would end in another
            part.
    """
    starts = [len(answer[: branch.start].rstrip()) for branch in block.branches]
    ends = [*starts[1:], len(answer[: block.end].rstrip())]
    regions = regions_of(answer)
    whole = (*regions.protected, *regions.code)
    branches = []
    for branch, start, end in zip(block.branches, starts, ends, strict=True):
        place = start + lead_length(answer[start:end], branch.title)
        lead = max((last for first, last in whole if first < place < last), default=place) - start
        if lead > end - start:
            raise StructureError(f"the lead of the part {answer[start:end].strip()[:40]!r} ends in another part")
        branches.append(replace(branch, start=start, end=end, lead=lead))
    return BlockSpan(tuple(branches))


def lead_length(part: str, title: str) -> int:
    """Return the number of characters of the lead of a part.

    Args:
        part: text of the part, with the white space before it.
        title: its title, which the lead ends with if the part begins with it.

    Raises:
        StructureError: the part has no words.
    """
    blank = len(part) - len(part.lstrip())
    marker = marker_of(part[blank:])
    behind = blank + (marker.length if marker else 0)  # marks of emphasis before a marker belong to it
    bold = BOLD.search(part, blank, behind + FAR + MAX_BOLD)
    found = part.find(title, blank, behind + FAR + len(title))
    if bold and bold.start() <= max(behind, found):
        end = bold.end()
    elif found >= 0:
        end = found + len(title)
    else:
        words = list(WORD.finditer(part, behind))[:FIRST_WORDS]
        if not words:
            raise StructureError(f"the part {part[:40]!r} has no words for a lead")
        end = words[-1].end()
    return _CLOSING.match(part, end).end()  # type: ignore[union-attr]  # it matches nothing, too
