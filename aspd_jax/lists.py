"""Lists in text that is being written: where one begins, its form and leads, and where the body of an item ends.

The functions read strings only. What they return holds for every continuation of the text; where the continuation
could change it, they return None. A line with its line feed is complete.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from aspd_jax.blocks.checks import find_dependence, similar
from aspd_jax.blocks.extract import CLOSERS, CONCLUSIONS
from aspd_jax.blocks.markers import CHINESE, SPACELESS, WORDS, number_of
from aspd_jax.blocks.spans import BlockSpan, BranchSpan
from aspd_jax.blocks.titles import TRAILING

LABEL_WORDS = 9  # maximum words before a colon; two characters of a script without spaces are a word
DASH_WORDS = 6  # maximum words before a dash
CLAUSE_WORDS = 6  # words of a lead that no punctuation ends
LEAD_CHARACTERS = 80  # maximum characters of a lead without emphasis
MAX_BOLD = 100  # maximum characters of a bold lead
CLOSER = 40  # characters of a line that decide whether it concludes a list
MAX_ITEMS = 10  # items of a list whose number nobody asked for
MIN_ITEMS = 3  # items of a list that forks
MAX_LEAD_TOKENS = 24
MAX_TRIES = 3  # first tokens of a lead that are barred, one after the other, because they began a repetition
RESERVE = 60  # tokens of the budget for each item, so that its body need not be cut

_WORD = re.compile(rf"[{SPACELESS}]{{1,2}}|[^\s:：{SPACELESS}]+")
_NUMERALS = {"1": "[0-9]{1,3}", "①": "[①-⑳]", "一": f"[{CHINESE}十]{{1,3}}"}  # patterns, by the first numeral
_NUMBERED = re.compile(
    rf"(?P<before>(?P<heading>#{{2,6}}[ \t]+)?(?:\*\*)?(?:(?P<word>{WORDS})[ \t]+|[(（])?)"
    rf"(?P<number>{'|'.join(_NUMERALS.values())})"
    r"(?P<after>(?:(?<=[①-⑳])|[.)](?:\*\*)?:?(?=[ \t])|(?P<colon>[:：](?:\*\*)?|[ \t]+[-–—](?=[ \t]))|[、．）](?:\*\*)?"
    r"|\ufe0f?\u20e3)[ \t]*)",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(r"(?:#{1,6} +)?(?:\*\*)?[0-9]{1,3}[.)](?:\*\*|[ \t])")
_BULLET = re.compile(r"[-*+–—·‣▪○●][ \t]+|[•●・][ \t]*")
_HEADING = re.compile(r"#{2,6}[ \t]+")
_HEADING_TEXT = re.compile(r"(?P<opening>(?:\*\*)?)(?P<text>.*?)(?P<closing>[:：]?(?:\*\*)?[:：]?)[ \t]*\n")
_RULE = re.compile(r"-{3}|_{3}|={3}|\*(?:[ \t]*\*){2,}[ \t]*\n")
_KEPT = ("```", "~~~", "$$", "\\[", "\\begin{", "|", ">")  # beginnings of lines that belong to the item before them


def _open_pattern(words: str, numbers: str) -> re.Pattern[str]:
    """Return the pattern of beginnings of a line that may still become a marker, heading, rule, code or formula.

    Args:
        words: pattern of words before the number.
        numbers: pattern of the number, or of its beginning.
    """
    return re.compile(
        rf"[#*_=+–—·‣▪○-]*[ \t]*(?:\*{{0,2}}|[(（])(?:{words})?[ \t]*(?:{numbers})[.)）:：、．]?\ufe0f?\*{{0,2}}[ \t]*"
        r"[-–—]?|[* \t]+|`{1,2}|~{1,2}|\$|\\[a-z]*",
        re.IGNORECASE,
    )


_OPEN = _open_pattern(r"[^\W\d_]+", r"[0-9]{0,3}|[①-⑳]")
_WORD_STARTS = sorted({word[:end] for word in WORDS.split("|") for end in range(1, len(word) + 1)})
_FIRST_OPEN = _open_pattern("|".join(_WORD_STARTS), "0{0,2}1?|①|一")
_BOLD = re.compile(
    rf"(?P<text>(?:(?!\*\*)[^\n]){{1,{MAX_BOLD}}}?)(?P<closing>[:：.]?\*\*(?:[ \t]?[:：]|[ \t][-–—](?=[ \t]))?)"
)
_BOLD_TAIL = re.compile(r"[ \t]?[-–—]?")  # behind bold words, it may still become part of their closing
_LABEL = re.compile(r"(?P<text>[^\n:：]{1,78}?)(?P<closing>:(?=[\s*])|：|[ \t][-–—](?=[ \t]))")
_SENTENCE = re.compile(r"[.!?](?=\s)|[。！？\n]")
_COMMA = re.compile(r"[,;:](?=\s)|[，；：、]|[ \t][(—–-]|（")
_COMPARES = re.compile(r"(?:\w+ )?(?:similarities|differences|comparisons?|contrasts?)", re.IGNORECASE)
_LEAD_ENDS = {
    "bold": re.compile(r"\*\*|:(?=[\s*])|[：\n]"),
    "label": re.compile(r"\*\*|:(?=[\s*])|：|[ \t][-–—](?=[ \t])|[.!?](?=\s)|[。！？\n]"),
    "heading": re.compile(r"\n"),
}


@dataclass(frozen=True)
class ListForm:
    """Form of the items of a list. Their parts, in order: `before`, number, `after`, `opening`, lead, `closing`, body.

    Attributes:
        kind: what ends a lead: emphasis (`bold`), a colon or dash (`label`), the line (`heading`), or nothing, where
            the lead is the first clause of the item (`clause`).
        before: text before the number; the whole marker of a list without numbers.
        numeral: numeral of the first item: `1`, `①` or `一`; empty: the list has no numbers.
        after: text behind the number.
        opening: emphasis before the lead, behind the marker.
        closing: punctuation and emphasis behind the lead.
        separator: text between two items.
    """

    kind: Literal["bold", "label", "heading", "clause"]
    before: str
    numeral: str = ""
    after: str = ""
    opening: str = ""
    closing: str = ""
    separator: str = "\n\n"

    def marker(self, index: int) -> str:
        """Return the text before the lead of an item; `index` counts from 0."""
        return f"{self.before}{_numeral(self.numeral, index)}{self.after}{self.opening}"

    def item(self, index: int, lead: str) -> str:
        """Return the beginning of an item, up to its body."""
        return f"{self.marker(index)}{lead}{self.closing}"

    def shown(self, index: int, lead: str) -> str:
        """Return an item with an ellipsis for its body, or a heading alone."""
        if self.kind == "heading":
            return self.item(index, lead)
        return f"{self.item(index, lead)}{'' if self.closing[-1:] in ('', '：') else ' '}..."

    def goes_on(self, index: int, token: str) -> bool:
        """Return whether a token between two items begins the item `index`."""
        marker, piece = self.marker(index), token.lstrip(" ")
        return bool(piece) and (marker.startswith(piece) or piece.startswith(marker))

    def begins_item(self, line: str) -> bool | None:
        """Return whether a line begins a further item of the list; None: this depends on its continuation."""
        if not self.before + self.numeral:
            return _begins_bold(line)
        marker, text = (re.sub(r"[ \t]+", " ", part) for part in (self.before + self.numeral + self.after, line))
        if self.numeral:
            text = re.sub(_NUMERALS[self.numeral], self.numeral, text, count=1)
        if text.startswith(marker) or text == marker.rstrip() + "\n":
            return True
        return None if marker.startswith(text) else False


class Lead(NamedTuple):
    """The beginning of an item, which tells it from the others.

    Attributes:
        form: form of the list.
        text: the lead without marker, emphasis and closing; empty: the line has no words.
        end: characters before the body, from the beginning of the line, or of the text behind the marker (`next_lead`).
    """

    form: ListForm
    text: str
    end: int


class Outline:
    """The leads of a list, which a model writes one after the other.

    Args:
        first: the first lead.
        most: maximum number of leads.

    Attributes:
        form: form of the list.
        leads: the leads so far.
        barred: first tokens that the next lead may not have.
    """

    def __init__(self, first: Lead, most: int) -> None:
        self.form, self.leads, self.barred, self._most = first.form, [first.text], list[int](), most

    def take(self, lead: Lead | None, token: int) -> bool:
        """Take the next lead, and return whether another one may follow.

        The first token of a lead that is similar to an earlier one is barred, up to `MAX_TRIES` times.

        Args:
            lead: the lead that the model wrote; None: none, within `MAX_LEAD_TOKENS` tokens.
            token: its first token.
        """
        if lead is None or not lead.text or CONCLUSIONS.match(lead.text) or _COMPARES.fullmatch(lead.text):
            return False
        if any(similar(lead.text, other) for other in self.leads):
            self.barred.append(token)
            return len(self.barred) <= MAX_TRIES
        self.leads.append(lead.text)
        self.barred = []
        return len(self.leads) < self._most


class Body(NamedTuple):
    """The body of an item at the beginning of a text.

    Attributes:
        end: characters that belong to the body, whatever follows; without white space at its end.
        gap: white space behind it.
        next: what begins behind the gap; None: the body may go on.
    """

    end: int
    gap: str
    next: Literal["item", "heading", "rule", "prose"] | None


class Beginning(NamedTuple):
    """A line that begins a list that may fork, or may begin one.

    Attributes:
        place: characters before the line.
        lead: lead of the first item; None: it depends on the continuation of the line.
        begins: whether the line begins an item; None: this depends on its continuation, too.
    """

    place: int
    lead: Lead | None
    begins: bool | None


class ListDetector:
    """Detector of lists that may fork, in serial text that is being written.

    Args:
        messages: the messages before the answer.
    """

    def __init__(self, messages: Sequence[str]) -> None:
        self._messages = messages
        self._passed: ListForm | None = None
        self._read = 0  # characters of the lines that are complete

    def pass_over(self, form: ListForm) -> None:
        """Take the next items of this form for parts of a list that goes on serially."""
        self._passed = form

    def look(self, text: str) -> Beginning | None:
        """Return what the last line of a text begins; None: no list that may fork, whatever follows in the line.

        It need not be called for a line whose first token cannot begin an item (`begins_item`).
        """
        *complete, (place, line, protected) = _lines(text)
        for start, other, inside in complete:
            if start >= self._read and not inside:
                self._begins(other)
        self._read = place
        if protected:
            return None
        begins = self._begins(line)
        if begins is False:
            return None
        lead = lead_of(line) if begins else None
        if lead is None:
            return None if "\n" in line else Beginning(place, None, begins)
        is_short = lead.form.kind in ("label", "clause") and line[lead.end :].strip(" .") == "\n"
        if is_short or not lead.text or fork_refusal(self._messages, lead.form, [lead.text], line, text[:place]):
            self.pass_over(lead.form)
            return None
        return Beginning(place, lead, True)

    def _begins(self, line: str) -> bool | None:
        """Return whether a line begins a list that may fork; None: this depends on its continuation."""
        begins = begins_item(line)
        if self._passed is None or not line.strip():
            return begins
        further = self._passed.begins_item(line)
        if further is not False:
            return None if further is None else False
        if not line.startswith((" ", "\t")) and begins is False:
            self._passed = None  # other text
        return begins


def begins_item(line: str) -> bool | None:
    """Return whether a line begins the first item of a list; None: this depends on its continuation.

    First items have the number 1, a bullet, a heading of level 2 to 6, or a bold lead with a colon, a dash or a line of
    its own. Indented lines belong to an item or to code.
    """
    if _HEADING.match(line):
        return True
    if numbered := _numbered(line):
        return number_of(numbered["number"]) == 1
    if line.startswith("**"):
        return _begins_bold(line)
    if _BULLET.match(line):
        return True
    return None if line[:1] not in (" ", "\t") and _FIRST_OPEN.fullmatch(line) else False


def lead_of(line: str) -> Lead | None:
    """Return the lead of the first item of a list, with the form of the list; None: the line has none so far."""
    numbered = _numbered(line)
    if not begins_item(line) or (numbered and number_of(numbered["number"]) != 1):
        return None
    return _any_lead(line)


def next_lead(form: ListForm, text: str) -> Lead | None:
    """Return the lead of a further item from the text behind its marker; None: it has not ended, or is too long."""
    start = 2 if form.kind == "label" and text.startswith("**") else 0
    end = None
    if form.kind == "clause":
        end = _clause_end(text, CLAUSE_WORDS)
    elif found := _LEAD_ENDS[form.kind].search(text, start):
        end = found.start()
    if end is None or (form.kind == "label" and _words(text[:end]) > LABEL_WORDS):
        return None
    return Lead(form, text[start:end].strip(" \t*:：.。"), end)


def body_of(form: ListForm, text: str) -> Body:
    """Return the body at the beginning of a text, which begins behind a lead.

    The body ends before a line with the next marker, a heading, a rule, or a paragraph at the margin. Below headings,
    bold lines and lines such as "Part 1: Sleep", paragraphs belong to the body, unless they conclude the answer. Nested
    items, code, tables, quotes and formulas always do. A line feed at the end of the text completes its last line.
    """
    titled = form.marker(0).startswith("**") or any(map(str.isalpha, form.before))  # such as "Part 1: "
    section = form.kind == "heading" or (titled and text.startswith("\n"))
    end, blank = 0, False
    for start, line, protected in _lines(text):
        if not line.strip():
            blank = True
            continue
        kind = (
            "body" if protected or start == 0 else _kind(form, line, section, blank, end == 0 and form.kind != "clause")
        )
        if kind == "body":
            end, blank = start + len(line.rstrip()), False
        else:
            return Body(end, text[end:start], kind)
    return Body(end, text[end:], None)


def _kind(
    form: ListForm, line: str, section: bool, blank: bool, empty: bool
) -> Literal["body", "item", "heading", "rule", "prose"] | None:
    """Return what a line after the first one begins or continues; None: this depends on its continuation.

    Args:
        form: form of the list.
        line: the line, with its line feed if it is complete.
        section: whether paragraphs belong to the body.
        blank: whether the line before is blank.
        empty: whether the item has no text but a closed lead before the line.
    """
    if line[0] in " \t":
        return "body"
    begins = form.begins_item(line)
    if begins is not False:
        return "item" if begins else None
    if heading := re.match(r"(#{1,6})[ \t]", line):
        level = len(form.before) - len(form.before.lstrip("#"))
        return "body" if 0 < level < len(heading[1]) else "heading"
    if _RULE.match(line):
        return "rule"
    if _ANY_NUMBER.match(line):
        return "item" if form.numeral else "prose" if blank and not section else "body"
    if line.startswith(_KEPT) or (_BULLET.match(line) and line.strip("* \t")):
        return "body"
    if _OPEN.fullmatch(line):
        return None
    if empty:
        return "body"
    if blank and not section:
        return "prose"
    if not line.endswith("\n") and len(line) < CLOSER:
        return None
    return "prose" if CLOSERS.match(line[:CLOSER]) else "body"


def separator_of(form: ListForm, gaps: Sequence[str]) -> str:
    """Return the text between the items of a list: the commonest of the gaps behind its bodies that have a line end."""
    ends = Counter("\n" * min(gap.count("\n"), 2) for gap in gaps if "\n" in gap)
    return ends.most_common(1)[0][0] if ends else form.separator


def fork_refusal(
    messages: Sequence[str], form: ListForm, leads: Sequence[str], first_item: str = "", before: str = ""
) -> str | None:
    """Return the first reason why the items of a list should be written one after the other, or None.

    Reasons are requests for a program, a derivation, a course of events or one connected text, the dependence that the
    data pipeline detects (`aspd_jax.blocks.checks`), and items that are a lead alone.

    Args:
        messages: the messages before the answer; the last one is what it answers.
        form: form of the list.
        leads: leads so far, one or more.
        first_item: text of the first item as far as it is known.
        before: text of the answer before the list.
    """
    if form.kind == "clause" and re.fullmatch(r"[.!?。！？]?\s*\n", first_item[len(form.item(0, leads[0])) :]):
        return f"no body: the first item is {first_item.strip()!r}"
    texts = [form.item(index, lead) + "\n" for index, lead in enumerate(leads)]
    texts[0] = max(texts[0], first_item + "\n", key=len)
    first = texts[0][len(form.marker(0)) :]
    for kind, (request, part) in _REFUSED.items():
        if found := request.search(messages[-1] if messages else "") or part.search(first):
            return f"{kind}: {' '.join(found[0].split())!r}"
    branches, answer = [], before
    for lead, text in zip(leads, texts, strict=True):
        branches.append(BranchSpan(lead, len(answer), len(answer) + len(text)))
        answer += text
    return find_dependence(messages, answer, BlockSpan(tuple(branches)))


# A request to write something, but not a question for how to write it.
_WRITE = (
    r"(?:^|[.!?:;,\n][^\S\n]*|\b(?:please|help me(?: to)?|(?:can|could|would|will) you|you to|and)\s+)(?:please\s+)?"
    r"(?:write|implement|develop|create|build|code|generate|compose|draft|craft|tell|structure|edit|rewrite|translate)\b"
    r"[^.?!\n]{0,60}?\b"
)
# Patterns of the question, and of the first item, which begins with its lead.
_REFUSED = {
    kind: (re.compile(request, re.IGNORECASE), re.compile(part, re.IGNORECASE))
    for kind, request, part in (
        (
            "program",
            rf"{_WRITE}(?:programs?|functions?|algorithms?|data structures?|(?:regular )?expressions?|regex|"
            r"quer(?:y|ies)|code|apps?|websites?)\b|```|程序|函数|代码",
            r"```|\A(?:import|initiali[sz]e|define (?:the|a) (?:function|class|variable))\b",
        ),
        (
            "connected text",
            rf"{_WRITE}(?:letters?|e-?mails?|stor(?:y|ies)|poems?|songs?|essays?|scripts?|posts?|reviews?|speech|"
            r"dialogues?|conversation|scenes?|novels?|articles?|paragraphs?|announcements?|lyrics|plot)\b|写一?[封首篇]",
            r"\A(?:introduction|intro|opening|dear|subject|greeting|salutation|title|host|narrator)\b|\A\[|引言|开头",
        ),
        (
            "derivation",
            r"\b(?:solve for|prove|derive|simplify|factori[sz]e|integrate|differentiate|find the value)\b|"
            r"\bwhat is the (?:value|length|area|volume|sum|product|remainder|distance|perimeter|slope)\b|"
            r"\b(?:reasoning|solution) steps?\b|"
            r"\bhow (?:do|did|would|can) you (?:solve|calculate|compute|work (?:it|this|that) out)\b|"
            r"\bshow (?:(?:your|all|the) )+(?:work(?:ing)?|steps|reasoning|calculations?)\b|"
            r"(?:^|[.!?\n][^\S\n]*)how (?:many|much)\b|"
            r"\w\s*=\s*-?[\w(]|(?:\b[a-hj-z]|[)|])\s*[<>≤≥]\s*-?\d|\w\^\d|\d\s*[+*/×÷]\s*\d|求解|证明|计算",
            r"\A(?:calculate|compute|substitute|simplify|solve|multiply|divide|subtract|convert)\b|\\\[|\$\$|\\frac|"
            r"\d\s*[+*/×÷]\s*\d|=\s*\$?\d",
        ),
        (
            "course of events",
            r"\b(?:recipes?|timeline|chronolog\w+|schedule|itinerary|timetable|agenda)\b|"
            r"\b\w+-step (?:\w+ )?(?:plan|process|workflow|procedure|guide|method|approach|routine)\b|"
            r"\b(?:summari[sz]e|retell|recap|continue) (?:the|this|that|my|your) (?:\w+ )?"
            r"(?:story|plot|tale|novel|events?)\b|"
            r"\bhow (?:do|can|should|would|to)\b(?: (?:i|you|we|one))? "
            r"(?:cook|bake|install|assemble|replace|repair|fix|plant)\b",
            r"\A(?:first(?:ly)?,|preheat\b|gather (?:the|your|all) (?:ingredients|materials|tools))",
        ),
    )
}


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the offset and the text of every line, and whether it continues code or a formula of a line before it.

    The last line has no line feed; it is empty if the text ends with one.
    """
    place, closing = 0, ""
    *complete, last = text.split("\n")
    for line in (*(f"{line}\n" for line in complete), last):
        yield place, line, bool(closing)
        place += len(line)
        if closing:
            closing = "" if closing in line else closing
        elif line.count("```") % 2:
            closing = "```"
        elif line.startswith("~~~"):
            closing = "~~~"
        elif line.lstrip().startswith("$$") and line.count("$$") % 2:
            closing = "$$"
        elif line.count("\\[") > line.count("\\]"):
            closing = "\\]"
        elif found := re.match(r"\s*\\begin\{(\w+)", line):
            closing = "" if f"\\end{{{found[1]}" in line else f"\\end{{{found[1]}"


def _numbered(line: str) -> re.Match[str] | None:
    """Return the match of a marker with a number; only a word or a heading gives a colon or dash this meaning."""
    found = _NUMBERED.match(line)
    if found is None or (found["colon"] and not found["word"] and not found["heading"]):
        return None
    return found


def _begins_bold(line: str) -> bool | None:
    """Return whether a line begins with bold words that are the lead of an item without a marker."""
    found = _BOLD.match(line, 2) if line.startswith("**") else None
    if found is None:
        bold = "**".startswith(line[:2]) and "\n" not in line and len(line) < MAX_BOLD + 4
        return None if bold else False
    if len(found["closing"]) > 2:  # with a colon, a dash or a full stop
        return True
    tail = line[found.end() :]
    return True if tail.strip(" \t") == "\n" else None if _BOLD_TAIL.fullmatch(tail) else False


def _any_lead(line: str) -> Lead | None:
    """Return the lead of an item with any number; None: the line has none so far."""
    numbered = _numbered(line)
    marker = numbered or _BULLET.match(line) or _HEADING.match(line)
    start = marker.end() if marker else 0
    before, numeral, after = marker[0] if marker else "", "", ""
    if numbered:
        before, after = numbered["before"], numbered["after"]
        numeral = next(first for first, digits in _NUMERALS.items() if re.match(digits, numbered["number"]))

    def lead(kind: Literal["bold", "label", "heading", "clause"], opening: str, text: str, closing: str) -> Lead | None:
        """Return a lead unless it has no word; spaces before the closing belong to the closing."""
        end = start + len(opening) + len(text) + len(closing)
        text, closing = text.rstrip(), text[len(text.rstrip()) :] + closing
        form = ListForm(kind, before, numeral, after, opening, closing)
        return Lead(form, text, end) if any(char.isalnum() for char in text) else None

    rest, inside = line[start:], (before + after).count("**") == 1  # bold words that begin before the number
    if before.startswith("#"):
        return lead("heading", *found.groups()) if (found := _HEADING_TEXT.match(rest)) else None
    if inside or rest.startswith("**"):
        opening = "" if inside else "**"
        found = _BOLD.match(rest, len(opening))
        if found is None or (found["closing"].endswith("**") and _BOLD_TAIL.fullmatch(rest, found.end())):
            return None
        return lead("bold", opening, *found.groups())
    if not marker:
        return None
    if found := _LABEL.match(rest):
        limit = DASH_WORDS if found["closing"][:1] in (" ", "\t") else LABEL_WORDS
        if _words(found["text"]) <= limit and not _SENTENCE.search(found["text"]):
            return lead("label", "", *found.groups())
    end = _clause_end(rest, LABEL_WORDS)
    return None if end is None else lead("clause", "", rest[:end], "")


def _clause_end(text: str, limit: int) -> int | None:
    """Return the end of the first clause of an item without a colon; None: the clause may go on.

    Args:
        text: the item behind its marker.
        limit: words after which no colon is expected. With `CLAUSE_WORDS`, none is expected at all.
    """
    words = list(_WORD.finditer(text, 0, LEAD_CHARACTERS))
    sentence = _SENTENCE.search(text)
    ends = [sentence.start()] if sentence else []
    ends += [words[limit].start()] if len(words) > limit else []
    ends += [LEAD_CHARACTERS] if len(text) > LEAD_CHARACTERS else []
    clause = text[: min(ends, default=len(text))]
    commas = (comma.start() for comma in _COMMA.finditer(clause) if _words(clause[: comma.start()]) > 1)
    if (ends or limit == CLAUSE_WORDS) and (comma := next(commas, None)):
        return comma
    if not ends:
        return None
    if sentence and sentence.start() == min(ends):
        return len(clause.rstrip())
    kept = words[:CLAUSE_WORDS]
    return len(TRAILING.sub("", clause[: kept[-1].end()])) if kept else 0


def _words(text: str) -> int:
    return len(_WORD.findall(text))


def _numeral(first: str, index: int) -> str:
    if first == "①":
        return chr(ord("①") + index)
    if first == "一":
        tens, ones = divmod(index + 1, 10)
        return (f"{CHINESE[tens - 1] if tens > 1 else ''}十" if tens else "") + (CHINESE[ones - 1] if ones else "")
    return str(index + 1) if first else ""
