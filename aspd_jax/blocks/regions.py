r"""Regions of an answer, such as a thought and the answer behind it, and ranges of characters that are never cut.

Tags divide an answer into regions: a block lies in one region, and no tag is in a branch. Tags are those of thoughts
and answers (`<think>`, `</reasoning>`, `[THINK]`, `◁think▷`), tokens of chat formats (`<|begin_of_thought|>`,
`<|channel|>`), and those around lines at the margin whose name is not one of HTML (`<plan>`).

Ranges that are never cut are code, display formulas (`$$…$$`, `\[…\]`, `\begin{…}…\end{…}`), formulas in running text,
elements, comments, fenced divisions (`:::`) and front matter. What is in one of them begins no other one: `$$` in a
program is no formula. The Markdown parser adds tables, quotes and indented code (`aspd_jax.blocks.extract`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

Range = tuple[int, int]
KEPT = 16  # answers whose regions are kept; the stages of an answer need them several times
FORMULA = 500  # maximum characters of a formula between single dollars
_THOUGHT = (
    r"(?:(?:\w+:)?(?:ant)?(?:think|thinks|thinking|thoughts?|reason|reasoning|reflection|scratchpad|analysis|cot|"
    r"chain_of_thought|rationale|deliberation|(?:inner_|internal_)?(?:monologue|thoughts)|(?:final_)?answer|final|"
    r"solution|response))"
)
# Tags that divide an answer wherever they are; capitals alone in square brackets, where other words are links.
_TAG = (
    rf"</?{_THOUGHT}>|◁/?{_THOUGHT}▷|(?-i:\[/?(?:THINK|THINKING|THOUGHT|REASONING|ANSWER|SOLUTION|RESPONSE)\])"
    r"|<[|｜][^\s<>|｜][^<>|｜\n]*[|｜]?>|<[^\s<>|｜][^<>|｜\n]*[|｜]>"
)
# The tag that begins an answer with a thought, in three parts; in the tag that ends it, the first part is another one.
_OPENING = re.compile(
    rf"\s*(?:(?P<first><|◁)(?P<rest>{_THOUGHT}[>▷])|(?P<square>\[)(?P<name>(?-i:[A-Z]+)\])"
    r"|(?P<token><\|begin)(?P<of>_of_\w+\|>))",
    re.IGNORECASE,
)
_ELEMENT = re.compile(r"(?P<open>[<\[])(?P<end>/?)(?P<name>[A-Za-z][\w:.-]*)(?:[ \t][^<>\[\]\n]*)?[>\]]")
_HTML = re.compile(
    r"a|abbr|address|article|aside|audio|b|blockquote|body|button|canvas|caption|center|cite|code|colgroup|dd|"
    r"del|details|dfn|dialog|div|dl|dt|em|fieldset|figcaption|figure|font|footer|form|h1|h2|h3|h4|h5|h6|head|"
    r"header|html|i|iframe|ins|kbd|label|legend|li|main|map|mark|math|menu|nav|noscript|object|ol|optgroup|"
    r"option|p|picture|pre|q|s|samp|script|search|section|select|small|span|strong|style|sub|summary|sup|svg|"
    r"table|tbody|td|template|textarea|tfoot|th|thead|title|tr|tt|u|ul|var|video",
    re.IGNORECASE,
)
_BEGIN = re.compile(
    r"(?P<front>\A(?:---|\+\+\+)[ \t]*\n(?=[\w\"'-]+[ \t]*[:=]))"
    r"|(?m:^(?:[ \t]|[-*+>][ \t]|\d{1,9}[.)][ \t])*(?P<fence>`{3,}(?=[^`\n]*$)|~{3,}))"
    r"|(?P<code>`+)"
    r"|(?m:^(?P<division>:{3,})(?=[^\n:]))"
    r"|(?P<comment><!--)"
    rf"|(?P<tag>{_TAG})"
    r"|(?P<element>[<\[])(?=[A-Za-z])"
    r"|(?<![\\$])(?P<dollars>\$\$)(?!\$)"
    r"|(?<!\\)(?:(?P<bracket>\\\[)|(?P<parenthesis>\\\()|(?P<environment>\\begin\{[\w*]+\}))"
    r"|(?<![\\$\w])(?P<dollar>\$)(?=[\w\\({\[|+-])",
    re.IGNORECASE,
)
_ANY = re.compile(r"[`~<\[◁$\\]|:::|\A(?:---|\+\+\+)")  # a match of `_BEGIN` has one; most answers have none
_SIGN = re.compile(r"[\\^_={}]")  # of a formula; a list of restaurants has `$$`, too
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_DOLLAR = re.compile(r"(?<=[^\s\\])\$(?![\w$])")


@dataclass(frozen=True)
class Regions:
    """The regions of an answer; all ranges are in order.

    Attributes:
        length: number of characters of the answer.
        tags: ranges of the tags between the regions.
        protected: ranges that are never cut, except code.
        code: ranges of code.
    """

    length: int
    tags: tuple[Range, ...]
    protected: tuple[Range, ...]
    code: tuple[Range, ...]

    def __iter__(self) -> Iterator[Range]:
        """Yield the range of each region."""
        place = 0
        for start, end in (*self.tags, (self.length, self.length)):
            if place < start:
                yield place, start
            place = max(place, end)

    def around(self, start: int, end: int) -> Range:
        """Return the region that contains a range; the whole answer if a tag is in the range."""
        return next((region for region in self if region[0] <= start and end <= region[1]), (0, self.length))


@lru_cache(KEPT)
def regions_of(answer: str) -> Regions:
    """Return the regions of an answer."""
    if not _ANY.search(answer):
        return Regions(len(answer), (), (), ())
    text = answer.replace("\r\n", " \n").replace("\r", "\n")
    found = _Scan(text)
    place = 0
    if opening := _OPENING.match(text):
        # The thought ends at the first closing tag, whatever it contains, as parsers of reasoning read it.
        first, rest = (part for part in opening.groups() if part)
        closing = f"<|end{rest}" if first.startswith("<|") else f"{first}/{rest}"
        place = text.find(closing, opening.end())
        if place >= 0:
            found.tags.append((opening.start(opening.lastindex or 0) - len(first), opening.end()))
            found.scan(opening.end(), place)
            found.tags.append((place, place + len(closing)))
            place += len(closing)
    found.scan(max(place, 0), len(text))
    tags = tuple(sorted(set(found.tags)))
    return Regions(len(text), tags, tuple(found.protected), tuple(found.code))


class _Scan:
    """A search for tags and for ranges that are never cut."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tags: list[Range] = []
        self.protected: list[Range] = []
        self.code: list[Range] = []
        self._closing = _closing_tags(text)
        self._absent: set[str] = set()  # ends that do not occur in the rest of the text

    def scan(self, place: int, end: int) -> None:
        """Search a range of the text."""
        self._absent.clear()
        while found := _BEGIN.search(self.text, place, end):
            kind = str(found.lastgroup)
            place = found.end()
            if kind == "tag":
                self.tags.append(found.span())
            elif kind == "element":
                place = self._element(found, end)
            elif stop := self._end(kind, found, end):
                start = found.start(kind)
                (self.code if kind in ("fence", "code") else self.protected).append((start, stop))
                place = stop

    def _element(self, opening: re.Match[str], end: int) -> int:
        """Add the tags or the range of an element of several lines; return where the search continues."""
        start = opening.start()
        tag = _ELEMENT.match(self.text, start, end)
        closing = self._closing.get(start)
        if tag is None or closing is None or closing[1] > end or "\n" not in self.text[start : closing[0]]:
            return tag.end() if tag else opening.end()
        at_margin = start == 0 or self.text[start - 1] == "\n"
        if at_margin and not _HTML.fullmatch(tag["name"]):
            self.tags += [tag.span(), closing]
            return tag.end()
        self.protected.append((start, closing[1]))
        return closing[1]

    def _end(self, kind: str, begin: re.Match[str], end: int) -> int | None:
        """Return the end of a range that is never cut; None: it has no end, or is something else."""
        text, start = self.text, begin.end()
        mark = begin[kind]
        if kind == "dollar":
            blank = _BLANK_LINE.search(text, start, min(end, start + FORMULA))
            closing = _DOLLAR.search(text, start, blank.start() if blank else min(end, start + FORMULA))
            formula = closing and _is_formula(text[start : closing.start()])
            return closing.end() if closing and formula else None
        pattern = {
            "front": rf"(?m:^(?:{re.escape(mark[:3])}|\.\.\.)[ \t]*$)",
            "fence": rf"(?m:^[ \t>]*{mark[0]}{{{len(mark)},}}[ \t]*$)",
            "code": rf"(?<!`){mark}(?!`)",
            "division": r"(?m:^:{3,}[ \t]*$)",
            "comment": "-->",
            "dollars": r"(?<![\\$])\$\$(?!\$)",
            "bracket": r"(?<!\\)\\\]",
            "parenthesis": r"(?<!\\)\\\)",
            "environment": re.escape(mark.replace("begin", "end", 1)),
        }[kind]
        closing = None if pattern in self._absent else re.compile(pattern).search(text, start, end)
        if closing is None:
            self._absent.add(pattern)
            return None
        inside = text[start : closing.start()]
        if kind in ("code", "parenthesis") and _BLANK_LINE.search(inside):
            return None
        alone = not inside.split("\n", 1)[0].strip() and not inside.rsplit("\n", 1)[-1].strip()
        if kind == "dollars" and not (alone and "\n" in inside) and not _is_formula(inside):
            return None
        return closing.end()


def _is_formula(text: str) -> bool:
    """Return whether text between dollars is a formula; over a line break, it has a sign of one."""
    return "\n" not in text or (_SIGN.search(text) is not None and _BLANK_LINE.search(text) is None)


def _closing_tags(text: str) -> dict[int, Range]:
    """Return the range of the closing tag of each element, by the offset of its opening tag."""
    opened: dict[str, list[int]] = defaultdict(list)
    found = {}
    for tag in _ELEMENT.finditer(text):
        name = tag["open"] + tag["name"]
        if not tag["end"]:
            opened[name].append(tag.start())
        elif opened[name]:
            found[opened[name].pop()] = tag.span()
    return found
