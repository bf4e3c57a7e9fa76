"""Questions composed from forms and topics, and follow-ups, for training a model on its own answers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from zlib import crc32

from aspd_jax.errors import ConfigError
from aspd_jax.sources import Conversation

SLOT = re.compile(r"\{(\w+)\}")
NUMBER = "n"
HELD_OUT_EVERY = 16  # one question in 16 is held out


@dataclass(frozen=True)
class Group:
    """Forms with a common share of all questions.

    Attributes:
        share: weight of the group relative to other groups.
        forms: questions with `{topic}` slots.
    """

    share: float
    forms: tuple[str, ...]


@dataclass(frozen=True)
class Questions:
    """Material of which questions are composed.

    Attributes:
        topics: values of each slot of a form.
        groups: forms by kind of question.
        numbers: values of `{n}`.
        follow_ups: questions that may follow any answer.
    """

    topics: dict[str, tuple[str, ...]]
    groups: dict[str, Group]
    numbers: tuple[str, ...] = field(default=("three", "five", "10"))
    follow_ups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.numbers:
            raise ConfigError("numbers: expected at least one number, got none")
        for name, group in self.groups.items():
            if not group.forms or group.share <= 0:
                raise ConfigError(
                    f"groups.{name}: expected forms and a share above 0, got {len(group.forms)}, {group.share}"
                )
            for form in group.forms:
                unknown = set(SLOT.findall(form)) - {NUMBER, *self.topics}
                if unknown:
                    known = ", ".join(sorted({NUMBER, *self.topics}))
                    raise ConfigError(f"groups.{name}: {form!r}: expected topics of {known}, got {unknown.pop()!r}")


def is_held_out(question: str) -> bool:
    """Return whether a question is held out from training, which its text alone decides."""
    return crc32(question.encode()) % HELD_OUT_EVERY == 0


def compose(material: Questions, count: int, seed: int, held_out: bool) -> list[tuple[str, str]]:
    """Return different questions, each with the name of its group, in random order.

    A group with too few questions passes its share to the others. Within a group, forms alternate.

    Args:
        material: topics, forms and follow-ups.
        count: number of questions; fewer if the forms have no more.
        seed: seed of the order.
        held_out: whether to return held-out questions or all others.
    """
    chance = random.Random(seed)
    left = {name: _turns(material, group, chance, held_out) for name, group in material.groups.items()}
    taken: dict[str, list[str]] = {name: [] for name in material.groups}
    known: set[str] = set()  # forms and topics may occur twice
    while left and sum(map(len, taken.values())) < count:
        name = min(left, key=lambda group: (len(taken[group]) + 1) / material.groups[group].share)
        question = next((text for text in left[name] if text not in known), None)
        if question is None:
            del left[name]
        else:
            taken[name].append(question)
            known.add(question)
    questions = [(question, name) for name, some in taken.items() for question in some]
    chance.shuffle(questions)
    return questions


def go_on(material: Questions, answered: Sequence[Conversation], count: int, seed: int) -> list[list[dict[str, str]]]:
    """Return conversations with a follow-up question each, in random order; follow-ups alternate.

    Args:
        material: topics, forms and follow-ups.
        answered: conversations that end with an answer.
        count: number of conversations; fewer if `answered` has no more.
        seed: seed of the order.

    Raises:
        ConfigError: there are no follow-ups.
    """
    if not material.follow_ups:
        raise ConfigError("follow_ups: expected at least one question, got none. Add questions that fit any answer.")
    chance = random.Random(seed)
    some = chance.sample(answered, min(count, len(answered)))
    follow_ups = material.follow_ups
    asked = [text for _ in range(0, len(some), len(follow_ups)) for text in _shuffled(follow_ups, chance)]
    return [
        [
            *({"role": role, "content": content} for role, content in conversation.messages),
            {"role": "user", "content": text},
        ]
        for conversation, text in zip(some, asked, strict=False)
    ]


def _shuffled(texts: Sequence[str], chance: random.Random) -> list[str]:
    return chance.sample(texts, len(texts))


def _turns(material: Questions, group: Group, chance: random.Random, held_out: bool) -> Iterator[str]:
    forms = [_of_form(material, form, chance, held_out) for form in group.forms]
    while forms:
        for form in list(forms):
            question = next(form, None)
            if question is None:
                forms.remove(form)
            else:
                yield question


def _of_form(material: Questions, form: str, chance: random.Random, held_out: bool) -> Iterator[str]:
    """Yield all questions of a form in random order, each with a random number."""
    slots = [name for name in dict.fromkeys(SLOT.findall(form)) if name != NUMBER]
    choices = list(product(*(material.topics[name] for name in slots)))
    chance.shuffle(choices)
    for chosen in choices:
        values = dict(zip(slots, chosen, strict=True)) | {NUMBER: chance.choice(material.numbers)}
        question = "".join(values[part] if place % 2 else part for place, part in enumerate(SLOT.split(form)))
        if is_held_out(question) == held_out:
            yield question
