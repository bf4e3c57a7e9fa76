"""Regular expressions of string formats that llguidance lacks, or reads less strictly than their definitions."""

from __future__ import annotations

from collections.abc import Mapping

DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"  # leap years
)
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# Characters of RFC 3987 beyond those of RFC 3986.
WIDE = r"\x{a0}-\x{d7ff}\x{f900}-\x{fdcf}\x{fdf0}-\x{ffef}\x{10000}-\x{1fffd}\x{20000}-\x{2fffd}\x{30000}-\x{3fffd}"
POINTER = "(?:/(?:[^~/]|~[01])*)*"
VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(?:\*|:[1-9][0-9]{0,3})?"
LITERAL = r"[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~" + WIDE + "]"


def _reference(wide: str, absolute: bool) -> str:
    """Return the expression of a URI reference (RFC 3986) without IP literals.

    Args:
        wide: further characters, for IRIs (RFC 3987).
        absolute: whether it has a scheme.
    """
    plain = rf"A-Za-z0-9\-._~!$&'()*+,;={wide}"
    escaped = "%[0-9A-Fa-f]{2}"
    segment = f"(?:[{plain}:@]|{escaped})"
    authority = f"(?:(?:[{plain}:]|{escaped})*@)?(?:[{plain}]|{escaped})*(?::[0-9]*)?"
    rooted = f"//{authority}(?:/{segment}*)*|/(?:{segment}+(?:/{segment}*)*)?"
    scheme = f"[A-Za-z][A-Za-z0-9+.\\-]*:(?:{rooted}|{segment}+(?:/{segment}*)*)?"
    relative = f"(?:{rooted}|(?:[{plain}@]|{escaped})+(?:/{segment}*)*)?"
    tail = rf"(?:\?(?:{segment}|[/?])*)?(?:#(?:{segment}|[/?])*)?"
    return f"^(?:{scheme if absolute else f'{scheme}|{relative}'}){tail}$"


def _expression(depth: int) -> str:
    """Return the expression of a part of a regular expression that has one meaning in all dialects.

    Args:
        depth: maximum depth of groups.
    """
    escape = r"\\[dDsSwWnrtfv^$.*+?()\[\]{}|/\\\-]"
    kind = rf"\[\^?(?:a-z|A-Z|0-9|[^\]\[\\^\-]|{escape})+-?\]"
    group = rf"\((?:\?:)?{_alternatives(depth - 1)}\)|" if depth else ""
    pairs = "|".join(f"{least},[{least}-9]" for least in range(2, 10))
    count = rf"\{{(?:[0-9]{{1,3}},?|[01],[1-9][0-9]{{0,2}}|{pairs}|[2-9],[1-9][0-9]{{1,2}})\}}"
    return rf"(?:(?:{group}{kind}|{escape}|[^\\^$.*+?()\[\]{{}}|]|\.)(?:(?:[*+?]|{count})\??)?|[\^$])"


def _alternatives(depth: int) -> str:
    return rf"(?:{_expression(depth)}|\|)*"


PATTERNS: Mapping[str, str] = {
    "date": f"^{DATE}$",
    "date-time": f"^{DATE}[tT]{TIME}$",
    "uri-reference": _reference("", False),
    "iri": _reference(WIDE, True),
    "iri-reference": _reference(WIDE, False),
    "uri-template": rf"^(?:{LITERAL}|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&]?{VARIABLE}(?:,{VARIABLE})*\}})*$",
    "json-pointer": f"^{POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{POINTER})$",
    "regex": f"^{_alternatives(2)}$",
}
