"""Extract blocks, branches and titles from the form of an answer, without a model (protocol, section 7, stage 1).

A Markdown parser gives the structure of blocks. Markers of lines give what models write beyond Markdown: numbers that
continue after an unindented paragraph, bold leads, "Step 2:", Chinese numbering, and lines such as "Pros: …".
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

from aspd_jax.blocks.markers import Marker, marker_of
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.spans import BlockSpan, BranchSpan
from aspd_jax.blocks.titles import titles_of

_NEWLINE = re.compile(r"\r\n?|\n")  # ends of lines in the Markdown parser
_CONCLUDING = (
    r"in (conclusion|summary)|overall|to (conclude|summari[sz]e|sum up)|conclusions?\b|summary\b|"
    r"final (thoughts|words)|总结|結論|まとめ"
)
# Titles of concluding parts, which depend on the others.
CONCLUSIONS = re.compile(
    rf"[-#*_\s\d.)]*(?:[ivx]+[.)]\s)?[*_\s]*({_CONCLUDING}|closing\b|outro\b|final remarks|结论)", re.IGNORECASE
)
# Beginnings of text that follows a list and does not belong to its last part.
CLOSERS = re.compile(
    rf"[#*_\s\d.]*({_CONCLUDING}|in (short|general|addition|the end)|final note|remember|"
    r"these (are|\w+ (are|can|will))|this (is|will)|"
    r"by (following|doing|using|implementing|taking|practi|incorporating)|"
    r"i hope|hope|let me know|ultimately|keep in mind|it'?s (important|also)|please|note\b|with (these|this)|if you|"
    r"总之|总的来说|综上|希望|以上)",
    re.IGNORECASE,
)
_WHOLE_SENTENCE = re.compile(r"[.!?。！？][\"'”’)*_]*\s*$")
_BOLD_LEAD = re.compile(r"(\*\*|__)[^\n]+?([:：]\1|\1\s*[:：]|\1\s*$)")
# The parser detects blocks only, except kinds that models rarely intend: underlined headings, HTML, link definitions.
_PARSER = MarkdownIt("commonmark", {"maxNesting": 40}).enable("table")
_PARSER.disable(["inline", "lheading", "html_block", "reference"])


@dataclass
class _Atom:
    """A unit that may begin a part (a heading, a list item, a paragraph line with a marker), or that is never cut.

    Attributes:
        start: index of its first line; it ends where the next atom starts.
        node: index of the Markdown block that contains it.
        kind: `heading`, `item`, `text` or `opaque` (code, tables, quotes, formulas, elements).
        family: family of its marker, shared by the parts of one list.
        number: number of its marker, or None.
        level: level of a heading.
        children: atoms inside a list item.
    """

    start: int
    node: int
    kind: str
    family: str = ""
    number: int | None = None
    level: int = 0
    children: list[_Atom] = field(default_factory=list)


class _Run(NamedTuple):
    """The parts of one list.

    Attributes:
        heads: indices of the atoms that begin a part.
        end: index after the last atom of the last part.
    """

    heads: tuple[int, ...]
    end: int


def propose(answer: str) -> list[tuple[BlockSpan, ...]]:
    """Return candidates from the form of an answer, each with at least one block: outermost lists, and innermost lists.

    Blocks are in order, do not overlap, and lie in one region each. Branches adjoin. Code, tables, quotes, formulas and
    elements are never cut.
    """
    found_regions = regions_of(answer)
    parts = [_Lines(answer[start:end], start, found_regions.protected) for start, end in found_regions]
    regions = [(lines, _atoms(lines)) for lines in parts]
    found: list[tuple[BlockSpan, ...]] = []
    for inner in (False, True):
        blocks = tuple(block for lines, atoms in regions if atoms for block in _blocks(lines, atoms, len(lines), inner))
        if blocks and blocks not in found:
            found.append(blocks)
    return found


class _Lines:
    """The lines of a region and their offsets.

    Args:
        answer: text of the region.
        start: offset of the region in the whole answer.
        protected: ranges of the whole answer that are never cut, except code.

    Attributes:
        answer, start: see above.
        starts: offset of each line.
        inside: indices of the lines that begin within a range of `protected`; they begin no part.
        opaque: indices of the lines that begin with such a range.
        markdown: input of the parser: the region with an empty line before each line that begins with a marker, or that
            follows a whole sentence and is not indented. Markdown would join these lines to the block before. The lines
            of `inside` are replaced by a word, which continues the paragraph.
        origin: for each line of `markdown`, the index of the line of the region.
    """

    def __init__(self, answer: str, start: int, protected: Sequence[tuple[int, int]]) -> None:
        self.answer, self.start = answer, start
        ends = [found.end() for found in _NEWLINE.finditer(answer)]
        self.starts = [0, *(end for end in ends if end < len(answer))] if answer else []
        self.inside, self.opaque = set[int](), set[int]()
        for first, end in ((first - start, end - start) for first, end in protected):
            line = bisect_right(self.starts, first) - 1
            if line >= 0 and not answer[self.starts[line] : first].strip():
                self.opaque.add(line)
            self.inside.update(range(line + 1, bisect_left(self.starts, end)))
        texts: list[str] = []
        self.origin: list[int] = []
        for line in range(len(self.starts)):
            text = answer[self.offset(line) : self.offset(line + 1)].rstrip("\r\n")
            at_margin = line > 0 and text[:1].strip() and line not in self.inside
            if at_margin and (_part_marker(text) or (text[0].isalpha() and _WHOLE_SENTENCE.search(texts[-1]))):
                texts.append("")
                self.origin.append(line)
            texts.append("x" if line in self.inside else text)
            self.origin.append(line)
        self.origin.append(len(self.starts))
        self.markdown = "\n".join(texts)

    def __len__(self) -> int:
        return len(self.starts)

    def offset(self, line: int) -> int:
        """Return the offset of a line; the length of the answer after the last line."""
        return self.starts[line] if line < len(self.starts) else len(self.answer)

    def text(self, line: int) -> str:
        """Return a line without the white space around it."""
        return self.answer[self.offset(line) : self.offset(line + 1)].strip()


def _atoms(lines: _Lines) -> list[_Atom]:
    """Return the Markdown blocks of an answer as a tree of atoms."""
    root: list[_Atom] = []
    levels = [root]
    lists: list[tuple[str, int]] = []
    closing, level = "", 0
    for number, token in enumerate(_PARSER.parse(lines.markdown)):
        if closing:  # inside a block that is never cut
            closing = "" if token.type == closing and token.level == level else closing
            continue
        kind = token.type
        if kind in ("bullet_list_open", "ordered_list_open"):
            lists.append((kind, number))
        elif kind in ("bullet_list_close", "ordered_list_close"):
            lists.pop()
        elif kind == "list_item_open":
            atom = _item(lines, token, *lists[-1], levels[-1])
            levels[-1].append(atom)
            levels.append(atom.children)
        elif kind == "list_item_close":
            levels.pop()
        elif token.map and token.nesting >= 0 and kind != "inline":
            start, end = (lines.origin[line] for line in token.map)
            if kind == "paragraph_open":
                levels[-1].extend(_paragraph(lines, start, end, number))
            elif kind == "heading_open":
                size = int(token.tag[1])
                levels[-1].append(_Atom(start, number, "heading", f"heading {size}", level=size))
            else:
                levels[-1].append(_Atom(start, number, "opaque"))
                if token.nesting == 1:
                    closing, level = kind.replace("_open", "_close"), token.level
    return root


def _item(lines: _Lines, token: Token, kind: str, node: int, before: Sequence[_Atom]) -> _Atom:
    start = lines.origin[token.map[0]] if token.map else 0
    if kind == "bullet_list_open":
        return _Atom(start, node, "item", f"bullet {token.markup}")
    number = int(token.info[:9] or 0)
    if before and before[-1].node == node:  # within a list, the order determines the number, as in "1. 1. 1."
        number = (before[-1].number or 0) + 1
    return _Atom(start, node, "item", f"N{token.markup}", number)


def _paragraph(lines: _Lines, start: int, end: int, node: int) -> Iterator[_Atom]:
    for line in range(start, end):
        if line in lines.inside:
            continue
        text = lines.text(line)
        marker = marker_of(text) if line == start else _part_marker(text)
        if line in lines.opaque:
            yield _Atom(line, node, "opaque")
        elif marker:
            yield _Atom(line, node, "text", marker.family, marker.number)
        elif line == start:
            yield _Atom(line, node, "text")


def _part_marker(line: str) -> Marker | None:
    """Return the marker of a line inside a paragraph, where a bold word without a colon is not a marker."""
    marker = marker_of(line)
    return None if marker and marker.family == "bold" and not _BOLD_LEAD.match(line) else marker


def _blocks(lines: _Lines, atoms: Sequence[_Atom], end: int, inner: bool) -> Iterator[BlockSpan]:
    """Yield the blocks of atoms that end at line `end`; `inner`: prefer blocks within parts."""
    runs = _outermost(_runs(lines, atoms))
    starts = [*(atom.start for atom in atoms), end]
    place = 0
    for run in [*runs, None]:
        # Text between two runs may contain a list of its own, such as that in the only item of a list.
        for between in range(place, run.heads[0] if run else len(atoms)):
            yield from _blocks(lines, atoms[between].children, starts[between + 1], inner)
        if run is None:
            return
        place = run.end
        nested: list[BlockSpan] = []
        for first, after in pairwise([*run.heads, run.end]) if inner else ():
            nested += _blocks(lines, atoms[first].children, starts[first + 1], inner)
            nested += _blocks(lines, atoms[first + 1 : after], starts[after], inner)
        if nested:
            yield from nested
        elif block := _block(lines, [starts[head] for head in run.heads], starts[run.end]):
            yield block


def _runs(lines: _Lines, atoms: Sequence[_Atom]) -> list[_Run]:
    """Return all sequences of two or more consecutive parts with markers of one family."""
    found = []
    for family in sorted({atom.family for atom in atoms if atom.family}):
        current: list[int] = []
        for place, atom in enumerate(atoms):
            if atom.family != family:
                continue
            if current and not _follows(atoms, current, place):
                found.append(_run(lines, atoms, current))
                current = []
            current.append(place)
        found.append(_run(lines, atoms, current))
    return [run for run in found if run is not None]


def _follows(atoms: Sequence[_Atom], current: Sequence[int], place: int) -> bool:
    """Return whether an atom continues the list whose parts so far are `current`."""
    before, here = atoms[current[-1]], atoms[place]
    between = atoms[current[-1] + 1 : place]
    if here.kind == "heading":
        return all(atom.kind != "heading" or atom.level > here.level for atom in between)
    if here.number is not None:
        in_turn = here.number == (before.number or 0) + 1
        return in_turn and not any(atom.kind == "heading" for atom in between)
    if any(atom.kind == "heading" for atom in between):
        return False
    if here.family == "bold":
        return True
    if here.family == "lead":
        return all(atom.kind in ("item", "opaque") for atom in between)
    if here.kind == "item" and here.node == before.node:
        return True
    return all(atom.kind == "opaque" for atom in between)


def _run(lines: _Lines, atoms: Sequence[_Atom], heads: Sequence[int]) -> _Run | None:
    """Return the run of parts that begin at `heads`, with the end of the last part; None if they are not parts."""
    heads = list(heads)
    family = atoms[heads[0]].family
    while heads and CONCLUSIONS.match(lines.text(atoms[heads[-1]].start)):
        heads.pop()  # a conclusion depends on the other parts
    alone = bool(heads) and heads[-1] - heads[0] == len(heads) - 1  # leads on adjacent lines
    if len(heads) < (3 if family == "lead" and alone else 2):
        return None
    if family == "ordinal" and atoms[heads[0]].number != 1:
        return None
    end = heads[-1] + 1
    following = atoms[end:]
    if family.startswith("heading"):
        level = atoms[heads[0]].level
        for atom in following:
            if atom.kind == "heading" and atom.level <= level:
                break
            if atom.kind == "text" and end > heads[-1] + 1 and CLOSERS.match(lines.text(atom.start)):
                break
            end += 1
        return _Run(tuple(heads), end)
    # The last part may be as long as its shortest sibling, counted in Markdown blocks.
    allowed = min(len({atom.node for atom in atoms[first + 1 : after]}) for first, after in pairwise(heads))
    begun = lines.answer[: lines.offset(following[0].start if following else len(lines))]
    if begun.rstrip().endswith((":", "：")):
        allowed = max(allowed, 1)
    taken: set[int] = set()
    for atom in following:
        if atom.kind == "heading" or (atom.kind == "text" and CLOSERS.match(lines.text(atom.start))):
            break
        if atom.node != atoms[heads[-1]].node and len(taken | {atom.node}) > allowed:
            break
        if atom.node == atoms[heads[-1]].node and (atom.family or atom.kind == "item"):
            break
        taken.add(atom.node)
        end += 1
    return _Run(tuple(heads), end)


def _outermost(runs: Sequence[_Run]) -> list[_Run]:
    """Return runs that do not overlap, preferring longer runs."""
    taken: set[int] = set()
    chosen = []
    for run in sorted(runs, key=lambda run: (run.heads[0] - run.end, -len(run.heads), run.heads[0])):
        place = range(run.heads[0], run.end)
        if taken.isdisjoint(place):
            chosen.append(run)
            taken.update(place)
    return sorted(chosen)


def _block(lines: _Lines, starts: Sequence[int], end: int) -> BlockSpan | None:
    """Return the block whose parts begin at these lines; None if a part has no text for a title.

    The last part may be a marker alone if the answer was cut off; it is then left out of the block.
    """
    edges = [*(lines.offset(line) for line in starts), lines.offset(end)]
    titles = titles_of([lines.answer[first:after] for first, after in pairwise(edges)])
    if not titles[-1]:
        titles, edges = titles[:-1], edges[:-1]
    if len(titles) < 2 or not all(titles):
        return None
    spans = zip(titles, pairwise(lines.start + edge for edge in edges), strict=True)
    return BlockSpan(tuple(BranchSpan(title, *span) for title, span in spans))
