"""Templates: answers whose literal text is known beforehand, with holes that the model fills (protocol, section 5).

Holes that do not depend on each other are filled in parallel, each as a branch that begins with the literal text before
it. A hole that depends on others is filled in a later block, which sees their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from aspd_jax.errors import RequestError
from aspd_jax.json_schema import json_rule

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
MAX_HOLES = 2048  # maximum holes of a template
_BRACES = re.compile(r"\{\{|\}\}|\{[^}]*\}|[{}]")


@dataclass(frozen=True)
class Hole:
    """A part of a template that the model writes.

    Attributes:
        name: unique name of the part.
        after: names of the holes whose values the model sees when it fills this one.
        context: text that precedes the value in the model's context, in place of the literal text before the hole;
            None: the literal text.
        schema: JSON schema of the value as text; None: free text, which ends before the literal text behind the hole.
        path: names of the members that lead to the value in a JSON object; empty: the answer is no JSON object.
    """

    name: str
    after: tuple[str, ...] = ()
    context: str | None = None
    schema: str | None = None
    path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "after", tuple(self.after))  # JSON has lists
        object.__setattr__(self, "path", tuple(self.path))


Part: TypeAlias = str | Hole


@dataclass(frozen=True)
class Template:
    """Literal text and holes in the order of the answer's text.

    Args:
        source: text with holes `{name}` or `{name after other, another}`, where `{{` and `}}` stand for braces; or the
            parts themselves.
        opening: literal text that precedes the first block; None: that of `literal_opening`.

    Attributes:
        parts: literal text and holes; literal text is never empty, and no two literals are adjacent.
        opening: literal text that precedes the first block, and is fed with the prompt.

    Raises:
        RequestError: the text is no template: line and column, and what is wrong there.
    """

    parts: tuple[Part, ...]
    opening: str

    def __init__(self, source: str | Sequence[Part], opening: str | None = None) -> None:
        parts = _parse(source) if isinstance(source, str) else source
        object.__setattr__(self, "parts", tuple(_joined(parts)))
        names = [hole.name for hole in self.holes]
        if not names:
            raise RequestError("template: expected at least one hole such as {name}, got none")
        if len(names) > MAX_HOLES:
            raise RequestError(f"template: expected at most {MAX_HOLES} holes, got {len(names)}")
        for name in names:
            if names.count(name) > 1:
                raise RequestError(
                    f"template: hole {name!r}: expected different names, got this one {names.count(name)} times"
                )
        for hole in self.holes:
            for other in hole.after:
                if other not in names:
                    raise RequestError(f"template: hole {hole.name!r}: after: expected names of holes, got {other!r}")
        self.stages  # noqa: B018 - a cycle is an error
        object.__setattr__(self, "opening", self.literal_opening if opening is None else opening)

    @cached_property
    def holes(self) -> tuple[Hole, ...]:
        """Return the holes in the order of the text."""
        return tuple(part for part in self.parts if isinstance(part, Hole))

    @cached_property
    def _places(self) -> Mapping[str, int]:
        """Return the index of each hole among the parts, by name."""
        return {part.name: index for index, part in enumerate(self.parts) if isinstance(part, Hole)}

    @cached_property
    def stages(self) -> tuple[tuple[Hole, ...], ...]:
        """Return the holes by stage: each depends on holes of earlier stages only, and is in the first such stage.

        Raises:
            RequestError: holes that depend on each other.
        """
        stages: list[tuple[Hole, ...]] = []
        done: set[str] = set()
        while left := [hole for hole in self.holes if hole.name not in done]:
            ready = tuple(hole for hole in left if done.issuperset(hole.after))
            if not ready:
                cycle = ", ".join(hole.name for hole in left)
                raise RequestError(f"template: expected holes that do not depend on each other, got {cycle}")
            stages.append(ready)
            done.update(hole.name for hole in ready)
        return tuple(stages)

    def blocks(self, most: int) -> list[tuple[Hole, ...]]:
        """Return the holes by block: one block or, with more holes than `most`, several for each stage."""
        return [stage[first : first + most] for stage in self.stages for first in range(0, len(stage), most)]

    @property
    def literal_opening(self) -> str:
        """Return the literal text that precedes the first block, and is fed with the prompt, by default.

        It is the literal text before the first hole without its last line and the white space before that.
        """
        first = self.parts[0]
        if isinstance(first, Hole) or self.holes[0].context is not None:
            return ""
        return first[: len(first[: first.rfind("\n") + 1].rstrip())]

    def lead(self, hole: Hole) -> str:
        """Return the literal text between the hole before and this one, without `opening`."""
        index = self._places[hole.name]
        before = self.parts[index - 1] if index else ""
        text = "" if isinstance(before, Hole) else before
        return text.removeprefix(self.opening) if index <= 1 else text

    def following(self, hole: Hole) -> str:
        """Return the literal text behind a hole; it ends free text."""
        index = self._places[hole.name] + 1
        after = self.parts[index] if index < len(self.parts) else ""
        return "" if isinstance(after, Hole) else after

    @cached_property
    def grammar(self) -> str:
        """Return the Lark grammar of the serial form: the text, whose holes are filled from left to right.

        Raises:
            RequestError: the schema of a hole is malformed or not supported.
        """
        text, rules = list[str](), list[str]()
        written = ""  # literal text that free text has written, as its end
        for place, part in enumerate(self.parts):
            if isinstance(part, str):
                text.append(json.dumps(part.removeprefix(written), ensure_ascii=False))
                written = ""
                continue
            text.append(f"hole_{place}")
            if part.schema is not None:
                rules.append(f"hole_{place}: {json_rule(part.schema)}")
                continue
            following = self.following(part)
            written = following.rstrip() or following
            end = f"[suffix={json.dumps(written, ensure_ascii=False)}]" if written else ""
            rules.append(rf"hole_{place}{end}: /(.|\n)*/")
        return "\n".join([f"start: {' '.join(text)}", *rules])

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the answer's text with these values, up to the first hole that has none."""
        text = ""
        for part in self.parts:
            if isinstance(part, Hole) and part.name not in values:
                break
            text += values[part.name] if isinstance(part, Hole) else part
        return text


def check_literals(template: Template) -> None:
    """Check the literal text of a template.

    Raises:
        RequestError: a hole has no literal text before it.
    """
    for hole in template.holes:
        if hole.context is None and not template.lead(hole):
            raise RequestError(f"template: hole {hole.name!r}: expected literal text before it, got none")


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join adjacent literals and drop empty ones."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return joined


def _parse(source: str) -> list[Part]:
    parts: list[Part] = []
    start = 0
    for found in _BRACES.finditer(source):
        at, text = found.start(), found[0]
        parts.append(source[start:at])
        if len(text) == 1:
            raise RequestError(f"{_place(source, at)}: expected a hole or a double brace, got a single {text!r}")
        parts.append(text[0] if text in ("{{", "}}") else _hole(source, at, text[1:-1]))
        start = found.end()
    return [*parts, source[start:]]


def _hole(source: str, at: int, text: str) -> Hole:
    words = re.fullmatch(rf"\s*({NAME.pattern})(?:\s+after\s+(.+))?\s*", text, re.S)
    after = [name.strip() for name in words[2].split(",")] if words and words[2] else []
    if words is None or not all(NAME.fullmatch(name) for name in after):
        raise RequestError(f"{_place(source, at)}: expected {{name}} or {{name after other, …}}, got {{{text}}}")
    return Hole(words[1], tuple(after))


def _place(source: str, at: int) -> str:
    line = source.count("\n", 0, at)
    return f"template: line {line + 1}, column {at - source.rfind(chr(10), 0, at)}"
