r"""Parallel answers of other projects, whose structure is written as tags in the text.

The formats differ in the names of their tags only (`FORMATS`), so one parser reads all of them. Tags are removed, and
so are announcements (goals, outlines, guidelines), which no reader sees. Everything else is content and stays as it is:
a tag that is alone on its line is removed with the line, any other without the characters around it.

Titles of the authors' own records are names. In all other formats the parts begin with a number and words, and titles
are leads (protocol, section 2).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from aspd_jax.blocks.spans import BlockSpan, BranchSpan, lead_of, structure_of
from aspd_jax.blocks.titles import titles_of
from aspd_jax.errors import RequestError, StructureError
from aspd_jax.pipeline.leads import with_leads
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, canonical
from aspd_jax.tokens import SEPARATOR


@dataclass(frozen=True)
class TagFormat:
    """Names of the tags of a format; an empty name: the format has no such tag.

    Attributes:
        branch: tag around a branch.
        group: tag around a block. Without it, a block begins with its announcement.
        announcement: tag around what announces the branches, which is removed.
        title: tag of one announced branch. Without an announcement, titles precede the block and are names.
        conclusion: tag around the text that draws branches together; it is serial text.
    """

    branch: str
    group: str = ""
    announcement: str = ""
    title: str = ""
    conclusion: str = ""

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tags."""
        return frozenset({self.branch, self.group, self.announcement, self.title, self.conclusion} - {""})

    @property
    def named(self) -> bool:
        """Return whether titles are names."""
        return bool(self.title) and not self.announcement

    def parents(self, name: str) -> frozenset[str]:
        """Return the tags in which a tag may stand directly; "": in none."""
        text = frozenset({""} if self.named else {"", self.branch, self.conclusion})
        if name == self.group or (name == self.title and self.named):
            return text
        if name == self.conclusion:
            return text | {self.group}
        return frozenset({self.group}) if self.group else text


FORMATS = {
    "llm-aspd": TagFormat("|branch|", group="|para|", title="|title|"),
    "multiverse": TagFormat("Path", "Parallel", "Goal", "Outline", "Conclusion"),
    "threadweaver": TagFormat("Thread", "Parallel", "Outlines", "Outline", "Conclusion"),
    "npr": TagFormat("step", announcement="guideline", title="plan", conclusion="takeaway"),
    "parallel-r1": TagFormat("Path", "Parallel", conclusion="Summary"),
}
DEEPEST = 64  # number of enclosing tags at which a tag is refused
_NAMES = "|".join(sorted({re.escape(name.strip("|")) for form in FORMATS.values() for name in form.names}))
# Tags of all formats, also with blanks or in another case, which no format has.
_TAG = re.compile(rf"<(\|?)[ \t]*(/?)[ \t]*({_NAMES})[ \t]*/?[ \t]*\1>", re.IGNORECASE)
_REST_OF_LINE = re.compile(r"[ \t]*(?:\r?\n|\Z)")


@dataclass
class Element:
    """A pair of tags, or the whole text.

    Attributes:
        name: name of the tags; empty for the whole text.
        start, end: range of characters, tags included.
        inner, close: range of characters between the tags.
        children: elements directly within.
        titles: number of announced branches.
    """

    name: str
    start: int
    inner: int
    close: int = 0
    end: int = 0
    children: list[Element] = field(default_factory=list)
    titles: int = 0


class ImportedAnswer(NamedTuple):
    """A structured answer of another format.

    Attributes:
        structure: the answer without tags.
        nested: number of blocks within branches, which are text of their branch.
        unequal: number of blocks with another number of branches than announced.
        single: number of blocks with fewer than two branches, which are serial text.
        serial: reason for each other block that is serial text.
    """

    structure: Structure
    nested: int = 0
    unequal: int = 0
    single: int = 0
    serial: tuple[str, ...] = ()


def import_answer(text: str, name: str) -> ImportedAnswer:
    """Return the structure of an answer.

    Args:
        text: answer with tags.
        name: name of its format.

    Raises:
        StructureError: a tag is misspelt, of another format, or at a wrong place; the message names the first one.
    """
    form = FORMATS[name]
    root, tags = parse_tags(text, form)
    if form.named:
        return ImportedAnswer(_named_structure(text, root, form))
    removed = removal_ranges(text, tags)
    starts = [start for start, _ in removed]
    sizes = list(accumulate((end - start for start, end in removed), initial=0))
    plain = "".join(text[end:start] for (_, end), (start, _) in pairwise([(0, 0), *removed, (len(text), 0)]))

    def place(offset: int) -> int:
        index = bisect_right(starts, offset)
        past = max(0, removed[index - 1][1] - offset) if index else 0
        return offset - sizes[index] + past

    blocks, serial = list[BlockSpan](), list[str]()
    groups = list(_groups(root, form))
    unequal = single = 0
    for titles, branches, depth in groups:
        if depth or len(branches) < 2:
            single += not depth
            continue
        try:
            blocks.append(_block(plain, [(place(branch.inner), place(branch.close)) for branch in branches]))
            unequal += bool(form.title) and titles != len(branches)
        except StructureError as error:
            serial.append(f"character {branches[0].start}: a block is serial text: {error}")
    structure = structure_of(plain, sorted(blocks, key=lambda block: block.start))
    nested = sum(depth > 0 for _, _, depth in groups)
    return ImportedAnswer(structure, nested, unequal, single, tuple(serial))


def parse_tags(text: str, form: TagFormat) -> tuple[Element, list[tuple[int, int]]]:
    """Parse the tags of a text.

    Returns:
        The whole text as an element, and the ranges of characters to remove: tags and announcements.

    Raises:
        StructureError: a tag is misspelt, of another format, or at a wrong place.
    """
    root = Element("", 0, 0, len(text), len(text))
    stack, removed = [root], list[tuple[int, int]]()
    for found in _TAG.finditer(text):
        name = _known(found, form)
        if not name:
            continue
        parent, where = stack[-1], f"character {found.start()}"
        if form.announcement and name == form.title and parent.name == form.announcement:
            parent.titles += not found[2]  # some writers do not close them
            continue
        if found[2] and parent.name != name:
            expected = spelled(parent.name, True) if parent.name else "text"
            raise StructureError(f"{where}: expected {expected}, got {found[0]}")
        if found[2]:
            stack.pop()
            parent.close, parent.end = found.span()
            if name == form.announcement:
                removed.append((parent.start, parent.end))
                continue
        elif parent.name not in form.parents(name) or (name == form.title and not form.named):
            inside = spelled(parent.name) if parent.name else "serial text"
            raise StructureError(f"{where}: expected no {found[0]} in {inside}, got one")
        elif len(stack) > DEEPEST:
            raise StructureError(f"{where}: expected fewer than {DEEPEST} tags around {found[0]}, got {len(stack) - 1}")
        else:
            parent.children.append(Element(name, found.start(), found.end()))
            stack.append(parent.children[-1])
        if name != form.announcement:
            removed.append(found.span())
    if len(stack) > 1:
        expected = spelled(stack[-1].name, True)
        raise StructureError(f"character {stack[-1].start}: expected {expected} after this tag, got none")
    return root, removed


def spelled(name: str, closing: bool = False) -> str:
    """Return a tag as it is written."""
    slash = "/" if closing else ""
    return f"<|{slash}{name.strip('|')}|>" if name.startswith("|") else f"<{slash}{name}>"


def _known(found: re.Match[str], form: TagFormat) -> str:
    """Return the name of a tag of the format, or nothing if it is text.

    Raises:
        StructureError: the tag is misspelt or of another format.
    """
    written = f"{found[1]}{found[3]}{found[1]}"
    exact = found[0] == spelled(written, bool(found[2]))
    if exact and written in form.names:
        return written
    where = f"character {found.start()}"
    for name in sorted(form.names):
        if name.casefold() == written.casefold():
            raise StructureError(f"{where}: expected {spelled(name, bool(found[2]))}, got {found[0]}")
    others = [other for other, its in FORMATS.items() if written in its.names]
    if exact and others:
        raise StructureError(f"{where}: expected no tag of {' and '.join(others)}, got {found[0]}")
    return ""


def removal_ranges(text: str, tags: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges to remove: each tag, or the whole line if only tags are on it.

    Args:
        text: text with tags.
        tags: start and end of each tag, in characters.
    """
    runs: list[list[tuple[int, int]]] = []
    for tag in sorted(tags):
        if runs and not text[runs[-1][-1][1] : tag[0]].strip(" \t"):
            runs[-1].append(tag)
        else:
            runs.append([tag])
    removed: list[tuple[int, int]] = []
    for run in runs:
        line = text.rfind("\n", 0, run[0][0]) + 1
        rest = _REST_OF_LINE.match(text, run[-1][1])
        alone = rest and not text[line : run[0][0]].strip(" \t")
        removed += [(line, rest.end())] if rest and alone else run
    return removed


def _groups(element: Element, form: TagFormat, depth: int = 0) -> Iterator[tuple[int, list[Element], int]]:
    """Yield the blocks in an element: number of titles, branches, and number of branches around the block.

    Raises:
        StructureError: a branch belongs to no block.
    """
    if form.group:
        groups = [child.children for child in element.children if child.name == form.group]
    else:
        groups = list(_announced(element, form))
    for parts in groups:
        yield sum(part.titles for part in parts), [part for part in parts if part.name == form.branch], depth
    for child in element.children:
        yield from _groups(child, form, depth + (child.name == form.branch))


def _announced(element: Element, form: TagFormat) -> Iterator[list[Element]]:
    """Yield the parts of each block that begins with an announcement and ends with its conclusion."""
    parts: list[Element] = []
    for child in element.children:
        if child.name == form.announcement:
            if parts:
                yield parts
            parts = [child]
        elif child.name == form.conclusion:
            if parts:
                yield parts
            parts = []
        elif parts:
            parts.append(child)
        else:
            before = spelled(form.announcement)
            raise StructureError(f"character {child.start}: expected {before} before {spelled(child.name)}, got none")
    if parts:
        yield parts


def _block(plain: str, spans: Sequence[tuple[int, int]]) -> BlockSpan:
    """Return a block of two or more branches with leads.

    Raises:
        StructureError: text is between the branches, one has no words, or two begin alike.
    """
    for (_, end), (start, _) in pairwise(spans):
        if between := plain[end:start].strip():
            raise StructureError(f"expected only branches, got the text {between[:40]!r} between two of them")
    titles = titles_of([plain[start:end] for start, end in spans])
    if not all(titles):
        raise StructureError(f"expected words in every branch, got none in branch {titles.index('') + 1}")
    branches = (BranchSpan(title, *span) for title, span in zip(titles, spans, strict=True))
    block = with_leads(plain, BlockSpan(tuple(branches)))
    leads = [lead_of(plain, branch).strip() for branch in block.branches]
    if again := [lead for lead, times in Counter(leads).items() if times > 1]:
        raise StructureError(f"expected branches that begin differently, got two with {again[0]!r}")
    return block


def _named_structure(text: str, root: Element, form: TagFormat) -> Structure:
    """Return the structure of an answer whose titles are names.

    Raises:
        StructureError: text is between the parts of a block, or a branch does not begin with its title.
    """
    items: list[Item] = []
    titles: list[Element] = []
    place = 0
    for element in root.children:
        if titles and element.start != place:
            raise StructureError(f"character {place}: expected {spelled(form.group)}, got text")
        if element.name == form.title:
            items.append(Serial(text[place : element.start]))
            titles.append(element)
        else:
            items += [Serial(text[place : element.start]), _named_block(text, titles, element)]
            titles = []
        place = element.end
    if titles:
        raise StructureError(f"character {place}: expected {spelled(form.group)} after the titles, got none")
    return canonical([*items, Serial(text[place:])])


def _named_block(text: str, titles: Sequence[Element], group: Element) -> Parallel:
    where, branches = f"character {group.start}", group.children
    if len(titles) < 2 or len(titles) != len(branches):
        counts = f"{len(titles)} titles and {len(branches)} branches"
        raise StructureError(f"{where}: expected two or more titles and as many branches, got {counts}")
    ends, starts = [group.inner, *(b.end for b in branches)], [*(b.start for b in branches), group.close]
    for end, start in zip(ends, starts, strict=True):
        if end != start:
            raise StructureError(
                f"character {end}: expected {spelled('|branch|')} or {spelled('|para|', True)}, got text"
            )
    found = []
    for title, branch in zip(titles, branches, strict=True):
        name, body = text[title.inner : title.close], text[branch.inner : branch.close]
        if not body.startswith(name + SEPARATOR):
            raise StructureError(f"character {branch.inner}: expected {name + SEPARATOR!r}, got {body[:40]!r}")
        found.append(Branch(name, body.removeprefix(name + SEPARATOR)))
    return Parallel(found)


def recognise(answers: Iterable[str]) -> str:
    """Return the name of the format whose tags most answers have.

    Raises:
        RequestError: no answer has the tags of a format, or several formats fit equally well.
    """
    votes: Counter[str] = Counter()
    for text in answers:
        used = {f"{tag[1]}{tag[3]}{tag[1]}" for tag in _TAG.finditer(text)}
        votes.update(name for name, form in FORMATS.items() if form.branch in used and used <= form.names)
    best = [name for name, count in votes.items() if count == max(votes.values())]
    if len(best) == 1:
        return best[0]
    found = f"those of {' and '.join(sorted(best))}" if best else "none"
    advice = f"Give --from NAME, one of {', '.join(FORMATS)}."
    raise RequestError(f"expected tags of one format in the answers of the first records, got {found}. {advice}")
