"""Titles of parts from their own leads: bold words, headings, text before a colon, or their first words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from aspd_jax.blocks.markers import BOLD, SPACELESS, marker_of

MAX_WORDS = 7  # maximum words of a lead that is a title
FIRST_WORDS = 5  # words of a title without a lead, and of a lead without a title
LAST_WORDS = 16  # maximum words if fewer do not distinguish the parts
# Words at the end of a title that a noun or a clause would follow.
TRAILING = re.compile(
    r"(?:[ \t,]+(?:an?|the|of|and|or|to|that|which|from|by|for|with|in|on|at|as|is|are|your|its|their|also|can))+$",
    re.I,
)
_HEADING = re.compile(r"#{1,6}[ \t]+")
_LEAD = re.compile(r"([^\n]{1,80}?)(?::(?=\s|$|\*)|：|[ \t]+[-–—][ \t]+|(?<=\w)—(?=\w))")
_SENTENCE = re.compile(r"([^\n]{1,80}?)(?:[.!?](?=\s|$|\*)|[。！？])")
# A word, or one character of a script without spaces.
WORD = re.compile(rf"[{SPACELESS}]|[^\s{SPACELESS}]+")
_EMPHASIS = re.compile(r"\*\*|__|`")
_EDGES = '*_#:：`.,;，。、；-–—"“”「」 \t'


def titles_of(parts: Sequence[str]) -> list[str]:
    """Return a title for every part, from its own words; empty for a part without words, such as a marker alone.

    Equal titles are extended by more words; they stay equal if the parts begin alike.
    """
    titles = [_title(part) for part in parts]
    for words in range(FIRST_WORDS, LAST_WORDS, 3):
        names = [title.casefold() for title in titles]
        times = Counter(names)
        if len(times) == len(names):
            break
        titles = [
            _first_words(_body(part), words) if times[name] > 1 else title
            for part, title, name in zip(parts, titles, names, strict=True)
        ]
    return titles


def _body(part: str) -> str:
    """Return a part without its marker; a marker that is alone on its line is kept if it is a word."""
    text = part.strip()
    heading = _HEADING.match(text)
    if heading:
        text = text[heading.end() :]
    marker = marker_of(text)
    if marker is None:
        return text
    bold = BOLD.match(text) if marker.length else None
    rest = text[marker.length : bold.end(2)] if bold else text[marker.length :]
    if rest[:4].strip() in ("[ ]", "[x]", "[X]"):
        rest = rest.lstrip()[3:]
    named = marker.family.startswith(("word", "第"))
    return text if named and not _bare(rest.split("\n", 1)[0]) else rest.strip()


def _title(part: str) -> str:
    heading = _HEADING.match(part.strip())
    text = _body(part)
    line = text.split("\n", 1)[0].strip()
    candidates = [line] if heading else []
    if bold := BOLD.match(line):
        candidates.append(bold[2])
    if lead := _LEAD.match(line):
        candidates.append(lead[1])
    if sentence := _SENTENCE.match(line):
        candidates.append(sentence[1])
    candidates.append(line)
    for candidate in candidates:
        title = _bare(candidate)
        if title and len(WORD.findall(title)) <= MAX_WORDS:
            return title
    return _first_words(text, FIRST_WORDS)


def _first_words(text: str, words: int) -> str:
    line = next((line for line in text.splitlines() if _bare(line)), "")
    found = list(WORD.finditer(line))[:words]
    return _bare(TRAILING.sub("", line[: found[-1].end()])) if found else ""


def _bare(text: str) -> str:
    """Return a lead without emphasis and punctuation around it; empty if no word is left."""
    text = _EMPHASIS.split(text.strip(_EDGES))[0].strip(_EDGES)
    return text if any(char.isalnum() for char in text) else ""
