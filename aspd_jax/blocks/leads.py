r"""Leads: the beginnings of the parts of an answer, which a model writes before the block (protocol, section 7).

A lead has the white space before its part, the marker, and the words that tell the part from others, with the
punctuation and the marks of emphasis behind them: `\n\n2. **Eat well**:`. The parts of an answer that are cut in this
way join to its text, whatever the branches write.
"""

from __future__ import annotations

import re
from dataclasses import replace

from aspd_jax.blocks.markers import BOLD, marker_of
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.spans import BlockSpan
from aspd_jax.blocks.titles import FIRST_WORDS, WORD
from aspd_jax.errors import StructureError

FAR = 8  # maximum characters of emphasis and blanks between a marker and its title
MAX_BOLD = 120  # maximum characters of a bold lead
# What may follow the words of a lead: emphasis, punctuation, emphasis, a dash.
_CLOSING = re.compile(r"[*_`\"”’」)\]]*[:：.!?。！？]?[*_`\"”’」)\]]*(?:[ \t]*[-–—](?=\s))?")


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
