"""Measures of the structure of an answer: whether it forks, and whether its branches are independent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aspd_jax.blocks.checks import find_dependence, shared_words
from aspd_jax.blocks.markers import BOLD, marker_of
from aspd_jax.blocks.measures import Count, measure
from aspd_jax.blocks.spans import spans_of
from aspd_jax.layout import Titles
from aspd_jax.structure import Parallel, Serial, Structure, plain_text


@dataclass(frozen=True)
class Health:
    """Measures of the structure of one answer.

    Attributes:
        forked: whether the answer has a block.
        well_formed: whether the answer parses and ended by itself.
        branches: number of branches of each block.
        dependent: number of blocks whose words indicate dependence (`aspd_jax.blocks.checks`).
        numbered: number of branches that begin with a number such as `3.`.
        misnumbered: number of those whose number does not follow that of the previous branch.
        joined: number of parts, and of texts after a block, that begin on the line on which the part before ends.
        mixed: number of blocks in which some branches begin with bold words and others do not.
        overrun: number of branches in which a line after the first begins with the words of a sibling's title.
        repeated: share of five-word sequences of a branch that also occur in a sibling, mean over branches; None: no
            branch has five words.
        tokens, branch_tokens, title_tokens: token counts of the answer (protocol, section 7).
    """

    forked: bool
    well_formed: bool
    branches: tuple[int, ...]
    dependent: int
    numbered: int
    misnumbered: int
    joined: int
    mixed: int
    overrun: int
    repeated: float | None
    tokens: int
    branch_tokens: int
    title_tokens: int


def health(
    messages: Sequence[str], structure: Structure, finished: bool, count: Count, titles: Titles = "leads"
) -> Health:
    """Measure the structure of an answer.

    Args:
        messages: all earlier messages of the conversation.
        structure: structure of the answer.
        finished: whether the answer ended by itself; a truncated answer is not well formed.
        count: returns the number of tokens of a text.
        titles: form of the titles.
    """
    blocks = [item for item in structure if isinstance(item, Parallel)]
    text = plain_text(structure)
    spans = spans_of(structure, titles)
    counts = measure(text, spans, count)
    found = [share for block in blocks for share in shared_words([branch.text for branch in block.branches])]
    shares = [share for share in found if share is not None]
    numbers = [number for block in blocks for number in _numbers([branch.text for branch in block.branches])]
    whole = all(len(block.branches) > 1 and all(b.title.strip() for b in block.branches) for block in blocks)
    return Health(
        forked=bool(blocks),
        well_formed=finished and whole,
        branches=tuple(len(block.branches) for block in blocks),
        dependent=sum(find_dependence(messages, text, span) is not None for span in spans),
        numbered=len(numbers),
        misnumbered=sum(not right for right in numbers),
        joined=sum(_joined(structure)),
        mixed=sum(len({is_bold(branch.text) for branch in block.branches}) > 1 for block in blocks),
        overrun=sum(sum(_overruns(block)) for block in blocks),
        repeated=sum(shares) / len(shares) if shares else None,
        tokens=counts.tokens,
        branch_tokens=counts.branch_tokens,
        title_tokens=counts.title_tokens,
    )


def _joined(structure: Structure) -> Iterator[bool]:
    """Yield, for every part after the first of its block and every text after a block, whether it is joined."""
    before, in_block = "", False
    for item in structure:
        parts = [item.text] if isinstance(item, Serial) else [branch.text for branch in item.branches]
        for number, part in enumerate(parts):
            if (in_block or number) and before.strip() and part.strip():
                yield "\n" not in before[len(before.rstrip()) :] + part[: len(part) - len(part.lstrip())]
            before = part
        in_block = not isinstance(item, Serial)


def _overruns(block: Parallel) -> Iterator[bool]:
    """Yield, for every branch, whether it goes on with the part of a sibling."""
    titles = [_words(branch.title) for branch in block.branches]
    for own, branch in enumerate(block.branches):
        lines = [_words(line) for line in branch.text.removeprefix(branch.title).splitlines()[1:]]
        siblings = [title for number, title in enumerate(titles) if number != own and title]
        yield any(line[: len(title)] == title for line in lines for title in siblings)


def _words(line: str) -> list[str]:
    """Return the words of a line without its marker, in lower case."""
    return re.findall(r"\w+", _without_marker(line.strip()).casefold())


def is_bold(text: str) -> bool:
    """Return whether a part begins with bold words, its marker aside."""
    text = text.strip()
    return bool(BOLD.match(text) or BOLD.match(_without_marker(text).lstrip()))


def _without_marker(line: str) -> str:
    marker = marker_of(line)
    return line[marker.length if marker else 0 :]


def _numbers(texts: Sequence[str]) -> list[bool]:
    """Return, for every branch that begins with a number, whether it is the expected number."""
    right, before = [], None
    for text in texts:
        marker = marker_of(text.strip())
        number = marker.number if marker else None
        if number is not None:
            right.append(before is None or number == before + 1)
        before = number if before is None or number is None else before + 1
    return right
