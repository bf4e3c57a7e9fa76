"""Markers that begin the parts of an answer: numbers, bullets, bold leads, headings, words such as "Step 2".

A marker belongs to a family, which the parts of one list share. Markers of counting families have a number, which
identifies the next part of a list across any text between.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

WORDS = (
    "step|day|week|month|year|phase|part|option|method|approach|scene|act|chapter|section|tip|idea|example|question|"
    "scenario|stage|level|verse|stanza|reason|factor|strategy|point|round|case|task|exercise|lesson|module|unit|rule|"
    "principle|paragraph|slide|episode|session|schritt|tag|étape|jour|paso|día|passo|шаг|день"
)
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
CHINESE = "一二三四五六七八九"
CHINESE_ORDINALS = {"首先": 1, "其次": 2, "再次": 3}
_CJK = f"{CHINESE}十"
# Characters of scripts without spaces between words, for use in a character class.
SPACELESS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"

# Patterns by family, tried in this order; the group `n` matches the number.
_COUNTED = {
    "N.": r"(?P<n>\d{1,3})\.(?=[ \t]|\*\*|$)",
    "N)": r"(?P<n>\d{1,3})[)](?=[ \t]|\*\*|$)",
    "(N)": r"[(（](?P<n>\d{1,3})[)）]",
    "N、": r"(?P<n>\d{1,3})[、．]",
    "N:": r"(?P<n>\d{1,3}):(?=[ \t])",
    "circled": r"(?P<n>[①-⑳])",
    "keycap": r"(?P<n>\d)\ufe0f?\u20e3",
    "word": rf"(?P<word>{WORDS})[ \t]+(?P<n>\d{{1,3}}|[A-Z]|{'|'.join(NUMBERS)})\b(?=[ \t]*(?:[:：.)\-–—*(]|$))",
    "kanji": rf"(?P<n>[{_CJK}]{{1,3}})[、．.]",
    "(kanji)": rf"[(（](?P<n>[{_CJK}]{{1,3}})[)）]",
    "第": rf"第(?P<n>[{_CJK}]{{1,3}}|\d{{1,3}})(?P<word>[步条點点章节節部天周种種个個]?)(?:[，,：:、是\s]|$)",
    "首先": r"(?P<n>首先|其次|再次)[，,：:]",
    "ordinal": rf"(?P<n>{'|'.join(ORDINALS)})(?:ly)?(?:,| of all,)",
    "I.": r"(?P<n>[IVX]{1,4})\.(?=[ \t])",
    "A.": r"(?P<n>[A-Z])\.(?=[ \t])",
    "a.": r"(?P<n>[a-z])\.(?=[ \t])",
    "A)": r"(?P<n>[A-Z])[)](?=[ \t])",
    "a)": r"(?P<n>[a-z])[)](?=[ \t])",
    "(a)": r"[(](?P<n>[a-zA-Z])[)](?=[ \t])",
}
_EMPHASIS = r"(?:\*\*|__)?"
_COUNTED_LINES = [(name, re.compile(_EMPHASIS + pattern, re.IGNORECASE)) for name, pattern in _COUNTED.items()]
# Matches a line if and only if a pattern of a family does; most lines have no marker, and one search shows it.
_ANY_COUNTED = re.compile(
    _EMPHASIS + "(?:" + "|".join(re.sub(r"\(\?P<\w+>", "(?:", pattern) for pattern in _COUNTED.values()) + ")",
    re.IGNORECASE,
)
_CASED = {"I.", "A.", "a.", "A)", "a)"}
ROMAN = ["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII"]
_BULLET = re.compile(r"[•●・](?=\S)|[•●○▪◦‣·・–—*+\-][ \t]+")
BOLD = re.compile(r"(\*\*|__)(?=\S)([^\n]{1,120}?)\1")  # groups: the marks and the bold text
_LEAD = re.compile(r"(?=[^\W_a-z]|[“\"'`])(?P<text>[^:：.!?;\n|]{2,60}?)(?::(?=\s|$|\*)|：)")
# Beginnings of introductory sentences, which are not leads.
_NO_LEAD = re.compile(r"(?:here|this|that|these|those|following|so|let|if|when|now|then|i|we|you|it|there|for)\b", re.I)
MAX_LEAD_WORDS = 8


class Marker(NamedTuple):
    """The marker of a line.

    Attributes:
        family: family of the marker.
        number: number in its list, from 1; None: the family does not count.
        length: length in characters, including marks of emphasis before it.
    """

    family: str
    number: int | None
    length: int


def marker_of(line: str) -> Marker | None:
    """Return the marker of a line without indentation, or None."""
    if not line:
        return None
    for name, pattern in _COUNTED_LINES if _ANY_COUNTED.match(line) else ():
        if (found := pattern.match(line)) and (name not in _CASED or found["n"].isupper() == name[0].isupper()):
            word = found.groupdict().get("word")
            number = number_of(found["n"], name == "I.")
            return Marker(f"{name} {word.lower()}" if word else name, number, found.end())
    if found := _BULLET.match(line):
        return Marker(f"bullet {line[0]}", None, found.end())
    if BOLD.match(line):
        return Marker("bold", None, 0)
    if unicodedata.category(line[0]) == "So":
        end = next((n for n, char in enumerate(line) if char.isspace()), 0)
        if 0 < end < 4:
            return Marker("symbol", None, end)
    found = _LEAD.match(line)
    if found and len(found["text"].split()) <= MAX_LEAD_WORDS and "://" not in line[:70] and not _NO_LEAD.match(line):
        return Marker("lead", None, 0)
    return None


def number_of(text: str, roman: bool = False) -> int:
    """Return the number of a numeral or an ordinal."""
    low = text.lower()
    if roman:
        return ROMAN.index(text) + 1 if text in ROMAN else 0
    if text.isdecimal():
        return int(text)
    if low in NUMBERS:
        return NUMBERS.index(low) + 1
    if low in ORDINALS:
        return ORDINALS.index(low) + 1
    if text in CHINESE_ORDINALS:
        return CHINESE_ORDINALS[text]
    if "①" <= text <= "⑳":
        return ord(text) - ord("①") + 1
    if low.isascii():
        return ord(low) - ord("a") + 1
    tens, ten, ones = text.rpartition("十")
    value = (CHINESE.index(tens) + 1 if tens and tens in CHINESE else 1) * 10 if ten else 0
    return value + (CHINESE.index(ones) + 1 if ones and ones in CHINESE else 0)
