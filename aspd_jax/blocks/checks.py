"""Rules that refuse a block: dependence among its branches, and defects of the list itself.

Every check yields reasons that name the branch and the words. The checks need no model, and detect only explicit
dependence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from aspd_jax.blocks.extract import CONCLUSIONS
from aspd_jax.blocks.markers import NUMBERS, SPACELESS, marker_of
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.spans import BlockSpan

_PLACES = "first|second|third|fourth|fifth|sixth|last|former|latter|previous|preceding|next|other|above|same"
_THINGS = (
    "options?|steps?|points?|items?|methods?|approach(?:es)?|examples?|sections?|paragraphs?|tips?|reasons?|factors?|"
    "suggestions?|strateg(?:y|ies)|ideas?|parts?|scenarios?|equations?|formulas?|results?|calculations?|values?"
)
_REFERENCES = re.compile(
    rf"\b(?:the|this|that|these|those|our|your|from|in|of|after) (?:{_PLACES}) (?:(?:two|three|few) )?(?:{_THINGS})\b"
    rf"|\bthe (?:former|latter)\b|\b(?:{_THINGS}) (?:above|earlier)\b"
    r"|\b(?:as|was|were|is|are) (?:mentioned|noted|described|discussed|listed|calculated|computed|shown|stated|defined|"
    r"explained) (?:above|earlier|before|previously|in step)|\b(?:mentioned|listed|described) above"
    r"|\b(?:see|like|unlike|following|using|with|to) (?:the )?above\b|\bthe above\b|\bas (?:before|above)\b"
    r"|\bsame as (?:in )?step\b|上述|前者|后者|上一[步点项条]|前一[步点项条]|如前所述|前面提到|上面的|同上|前述|上記",
    re.IGNORECASE,
)
_THIS = r"\b(?:this|that|these|those)"
_NUMBERED = re.compile(
    rf"\b(?:{_THINGS})[ \t]+(?:#|no\.? ?)?(\d{{1,2}})\b(?!\s*(?:%|\w*[:.)]\s))"
    r"|(?:步骤|第)\s*(\d{1,2}|[一二三四五六七八九十])\s*[步点项条]",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"(?:then|next|now|after (?:that|this)|afterwards|subsequently|therefore|thus|hence|consequently|as a result|"
    r"finally,? (?:we|add|combine|multiply|divide|subtract|substitut\w*|plug)|with (?:this|that|these|those)|"
    r"using (?:this|that|these|those|the result)|now that|"
    r"once (?!upon\b|again\b|or twice\b|in a\b|an? (?:hour|day|week|month|year|season|quarter)\b)|"
    r"so(?:,| (?:he|she|they|we|you|it|the|in total))|(?:that|this) means|"
    r"repeat (?:this|that|the)|in addition to (?:this|that|these)|substitut\w+|plug(?:ging)? (?:in|this|that|the))\b"
    r"|然后|接着|接下来|随后|因此|所以|由此|再将|其次再",
    re.IGNORECASE,
)
# Beginnings of a part that continues the one before. Behind a title they may refer to the title.
_CONTINUES = re.compile(
    r"(?:however|but|yet|moreover|furthermore|additionally|also|besides|likewise|similarly|instead(?! of)|"
    r"on the other hand|in addition(?! to)|(?:in|by) contrast(?! to)|conversely|nevertheless|nonetheless|"
    r"despite (?:this|that|these)|"
    r"(?:this|these|those) (?:list|also|includes?|means?|helps?|is|are|has|have|can|could|may|might|will|would))\b",
    re.IGNORECASE,
)
# Results of a step in cooking, mixing and calculating that the next step uses.
_LEFT_OVER = re.compile(
    r"\b(?:the|this|that|your) (?:\w+ )?(?:mixture|dough|batter|resulting \w+|remaining \w+|result|rest of the|"
    r"reserved \w+|marinade|filling|blended \w+|cooked \w+|mashed \w+|chopped \w+|prepared \w+)\b",
    re.IGNORECASE,
)
_RESULT = re.compile(r"(?:=|≈|≅|~|equals?|is about|gives?|get|comes? to|total of)\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)")
_NUMBER = re.compile(r"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?(?![\w])")
_OPERAND = re.compile(r"(?<![\w.,])(\d+)(?=\s*[-+*/×÷x]\s*\$?\d)|[-+*/×÷x]\s*\$?(\d+)(?!\w)")
_SYMBOL = re.compile(r"(?<![\w\\])([A-Za-z](?:_\w+|\d)?)\s*=(?!=)")
_RECIPE = re.compile(r"ingredients\b.*\n(?:instructions|directions|method|preparation)\b", re.IGNORECASE)
_AFTER = re.compile(r"after (?!all\b)", re.IGNORECASE)
# Questions for steps, plans and schedules, whose parts have an order.
_ASKS_FOR_COURSE = re.compile(
    r"\bstep[- ]by[- ]step\b|\bin (?:\w+ ){0,2}steps\b|\b(?:dai|week|month|year)ly (?:plan|schedule|routine)\b"
    r"|\b(?:schedule|timetable|itinerary) for\b|逐步|一步一步|分步",
    re.IGNORECASE,
)
# Questions for one number, whose answers derive it.
_ASKS_FOR_NUMBER = re.compile(
    r"\bhow (?:many|much)\b[^.?!\n]*\?|\b(?:estimate|calculate|compute) (?:how|the)\b|\bwhat is the probability\b|多少",
    re.IGNORECASE,
)
_FENCE = re.compile(r"(?m)^[ \t]*(?:```|~~~)")
_INNER_COUNTER = re.compile(r"(?m)^[ \t]*(\d{1,3})[.)][ \t]")
REPEATED = 6  # length of a repeated run in words
GRAM = 5  # length in words of sequences that siblings may share
MAX_SHARED = 0.1  # maximum share of such sequences of a branch that occur in a sibling
MAX_ALIKE = 0.6  # maximum share of words that two titles have in common
# Parts of a course of events: each follows from the one before, whatever its words say.
_COURSES = {
    *("day", "week", "month", "year", "hour", "step", "phase", "stage", "scene", "act", "chapter", "verse", "stanza"),
    *("paragraph", "slide", "episode", "session", "round", "lesson"),
}
_TIME = re.compile(
    r"[*_\s]*\d{1,2}(?:[:.]\d\d)?\s*(?:-\s*\d{1,2}(?:[:.]\d\d)?\s*)?(?:[ap]\.?m\b|o'clock|h\b)", re.IGNORECASE
)
_WORDS = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+[+#]*")  # C++ and C# are different words
COUNTS = {*NUMBERS[1:], *map(str, range(2, 21))}


def find_dependence(messages: Sequence[str], answer: str, block: BlockSpan) -> str | None:
    """Return the first reason why the branches of a block depend on each other, or None.

    Args:
        messages: the messages before the answer; the last one is what it answers.
        answer: text of the answer.
        block: block to check.
    """
    texts = [answer[branch.start : branch.end].strip() for branch in block.branches]
    titles = [branch.title for branch in block.branches]
    before = "\n".join([*messages, answer[: block.start]])
    reasons = chain(
        _says_nothing(titles),
        _duplicates(titles),
        _references(texts),
        _demonstratives(titles, texts),
        _goes_on(titles, texts),
        _sums_up(titles),
        _shared_counter(texts),
        _shared_results(before, texts),
        _shared_symbols(before, texts),
        _course(messages, titles, texts),
        _explains_code(answer, block),
        _derives(messages),
    )
    return next(reasons, None)


def _says_nothing(titles: Sequence[str]) -> Iterator[str]:
    for number, title in enumerate(titles, 1):
        if title.rstrip(".)") == str(number):
            yield f"title says nothing: branch {number} is called {title!r}"


def _duplicates(titles: Sequence[str]) -> Iterator[str]:
    seen: dict[str, int] = {}
    leads: dict[str, int] = {}  # text before a colon: a repeated item, or the speaker in a dialogue
    for number, title in enumerate(titles, 1):
        if (name := " ".join(title.casefold().split())) in seen:
            yield f"duplicate title: branches {seen[name]} and {number} are both {title!r}"
        seen[name] = number
        lead, _, rest = re.sub(r"^\d+[.)]\s*", "", name).partition(":")
        if rest and lead in leads:
            yield f"duplicate title: branches {leads[lead]} and {number} both begin with {lead + ':'!r}"
        if rest:
            leads[lead] = number


def _references(texts: Sequence[str]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        if number > 1 and (found := _REFERENCES.search(text)):
            yield f"back reference: branch {number} says {found[0]!r}"
        for found in _NUMBERED.finditer(text):
            to = found[1] or found[2]
            if (to.isdecimal() and 1 <= int(to) <= len(texts) and int(to) != number) or not to.isdecimal():
                yield f"back reference: branch {number} says {found[0]!r}"


def _demonstratives(titles: Sequence[str], texts: Sequence[str]) -> Iterator[str]:
    """Yield references to a sibling by its title, as in "Example: …" and "Explanation: This example …"."""
    for number, text in enumerate(texts, 1):
        for other, title in enumerate(titles, 1):
            found = re.search(rf"{_THIS} {re.escape(title)}s?\b", text, re.IGNORECASE) if title else None
            if found and other != number:
                yield f"back reference: branch {number} says {found[0]!r}, and branch {other} is called so"


def _goes_on(titles: Sequence[str], texts: Sequence[str]) -> Iterator[str]:
    for number, (title, text) in enumerate(zip(titles, texts, strict=True), 1):
        if number == 1:
            continue
        if _CONTINUES.match(title) or _GOES_ON.match(title) or _GOES_ON.match(_after_title(title, text)):
            yield f"goes on: branch {number} begins as what follows something, {_start(text)!r}"
        if (found := _LEFT_OVER.search(text)) and any(_noun(found[0]) in earlier for earlier in texts[: number - 1]):
            yield f"goes on: branch {number} takes up {found[0]!r}"


def _sums_up(titles: Sequence[str]) -> Iterator[str]:
    if CONCLUSIONS.match(titles[-1]):
        yield f"sums up: branch {len(titles)}, the last, is called {titles[-1]!r}"


def _after_title(title: str, text: str) -> str:
    _, found, rest = text.partition(title)
    return rest.lstrip("*_:：.。,-–— \t\r\n") if found else text


def _start(text: str) -> str:
    return " ".join(text.split())[:40]


def _noun(phrase: str) -> str:
    return phrase.rsplit(" ", 1)[-1]


def _shared_counter(texts: Sequence[str]) -> Iterator[str]:
    last = 0
    for number, text in enumerate(texts, 1):
        body = text.split("\n", 1)[1] if "\n" in text else ""
        inner = [int(found[1]) for found in _INNER_COUNTER.finditer(body)]
        if inner and last and inner[0] == last + 1 and inner[0] > 1:
            yield f"shared counter: branch {number} counts on from {last}"
        last = inner[-1] if inner else 0


def _shared_results(before: str, texts: Sequence[str]) -> Iterator[str]:
    known = set(_numbers(before))
    results: dict[str, int] = {}
    for number, text in enumerate(texts, 1):
        operands = {found[1] or found[2] for found in _OPERAND.finditer(text)}
        for value in _numbers(text):
            # A single digit may be a coincidence, unless it is an operand.
            if value in results and results[value] != number and (len(value.lstrip("-")) > 1 or value in operands):
                yield f"shared result: branch {number} uses {value}, which branch {results[value]} works out"
        for found in _RESULT.finditer(text):
            value = found[1].replace(",", "").rstrip(".")
            if value not in known:
                results.setdefault(value, number)


def _numbers(text: str) -> Iterator[str]:
    return (found[0].replace(",", "") for found in _NUMBER.finditer(text))


def _shared_symbols(before: str, texts: Sequence[str]) -> Iterator[str]:
    defined: dict[str, int] = {}
    for number, text in enumerate(texts, 1):
        own = set(_SYMBOL.findall(text))
        for symbol, by in defined.items():
            used = re.search(rf"(?<![\w\\]){re.escape(symbol)}\s*[-+*/^×÷]|[-+*/^×÷]\s*{re.escape(symbol)}(?!\w)", text)
            if used and symbol not in own and not re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", before):
                yield f"shared symbol: branch {number} uses {symbol}, which branch {by} defines"
        for symbol in own:
            defined.setdefault(symbol, number)


def _course(messages: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Iterator[str]:
    if found := _ASKS_FOR_COURSE.search(_request(messages)):
        yield f"course of events: the question says {_start(found[0])!r}"
    if found := _RECIPE.search("\n".join(titles)):
        yield f"course of events: parts are called {_start(found[0])!r}"
    later = [_after_title(title, text) for title, text in zip(titles[1:], texts[1:], strict=True)]
    if len(begin := [text for text in later if _AFTER.match(text)]) > 1:
        yield f"course of events: parts begin as {_start(begin[0])!r} and {_start(begin[1])!r}"
    for title, text in zip(titles, texts, strict=True):
        marker = marker_of(text.lstrip("# "))
        words = {(marker.family if marker else "").rpartition(" ")[2], *title.casefold().split()[:1]}
        if words & _COURSES:
            yield f"course of events: a part begins as {_start(text)!r}"
        if _TIME.match(title):
            yield f"course of events: a part is called {title!r}"


def _explains_code(answer: str, block: BlockSpan) -> Iterator[str]:
    """Yield a list that explains the program before it in its region, in the order of its lines."""
    first, _ = regions_of(answer).around(block.start, block.end)
    if _FENCE.search(answer, first, block.start) and not _FENCE.search(answer, block.start, block.end):
        yield "explains code: a program is before it, and its parts have none"


def _derives(messages: Sequence[str]) -> Iterator[str]:
    if found := _ASKS_FOR_NUMBER.search(_request(messages)):
        yield f"derivation: the question asks for a number, {_start(found[0])!r}"


def find_defects(answer: str, block: BlockSpan) -> Iterator[str]:
    """Yield the reasons why a block should not be taught although its branches may be independent.

    A model repeats such defects in every list, because its branches do not see each other.

    Args:
        answer: text of the answer.
        block: block whose branches begin with the white space before them.
    """
    texts = [answer[branch.start : branch.end] for branch in block.branches]
    titles = [branch.title for branch in block.branches]
    return chain(_gaps(answer, block), _alike(titles), _shared_words(texts))


def _gaps(answer: str, block: BlockSpan) -> Iterator[str]:
    """Yield unequal white space between branches, and text that Markdown reads as part of the last one."""
    starts = [branch.start for branch in block.branches[1:]]  # before the first part is text of another kind
    gaps = {re.sub(r"[ \t]+\n", "\n", answer[start : start + _blank(answer, start)]) for start in starts}
    if len(gaps) > 1:
        yield f"unequal gaps: its parts begin with {' and '.join(map(repr, sorted(gaps)))}"
    behind = answer[block.end : regions_of(answer).around(block.start, block.end)[1]]
    gap = behind[: _blank(answer, block.end)]
    if behind.strip() and gap.count("\n") == 1 and marker_of(behind.strip()) is None:
        yield f"single break: the text behind it, {_start(behind)!r}, belongs to its last part in Markdown"


def _blank(answer: str, start: int) -> int:
    return len(answer[start:]) - len(answer[start:].lstrip())


def _alike(titles: Sequence[str]) -> Iterator[str]:
    for number, title in enumerate(titles):
        for other in titles[:number]:
            if similar(title, other):
                yield f"similar titles: {other!r} and {title!r}"


def similar(title: str, other: str) -> bool:
    """Return whether two titles or leads have most of their words in common."""
    own, words = ({word.casefold().removesuffix("s") for word in _WORDS.findall(text)} for text in (title, other))
    return len(own & words) > MAX_ALIKE * len(own | words)


def _shared_words(texts: Sequence[str]) -> Iterator[str]:
    for number, share in enumerate(shared_words(texts), 1):
        if share is not None and share > MAX_SHARED:
            yield f"repeats a sibling: {share:.0%} of the five-word sequences of branch {number}"


def shared_words(texts: Sequence[str]) -> list[float | None]:
    """Return the share of five-word sequences of each branch that occur in a sibling; None: it has none."""
    grams = [_grams(text) for text in texts]
    shares: list[float | None] = []
    for number, own in enumerate(grams):
        others = {gram for other, some in enumerate(grams) if other != number for gram in some}
        shares.append(sum(gram in others for gram in own) / len(own) if own else None)
    return shares


def _grams(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.casefold())
    return [tuple(words[place : place + GRAM]) for place in range(len(words) - GRAM + 1)]


def _request(messages: Sequence[str]) -> str:
    """Return what an answer answers: the last message before it, or nothing."""
    return messages[-1] if messages else ""


def asked_for(messages: Sequence[str]) -> int | None:
    """Return how many parts the last message asks for: the only number from 2 to 20 in it, as a word or figures."""
    words = (word.casefold() for word in re.findall(r"\b[A-Za-z]+\b|\b\d+\b", _request(messages)))
    found = {NUMBERS.index(word) + 1 if word in NUMBERS else int(word) for word in words if word in COUNTS}
    return found.pop() if len(found) == 1 else None


def repetition(text: str) -> float:
    """Return the share of words that repeat earlier text: the last word of a run of six that occurred before.

    Text of a model in a loop approaches 1; other text stays near 0.
    """
    words = text.casefold().split()
    runs = [tuple(words[end - REPEATED : end]) for end in range(REPEATED, len(words) + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
