"""Synthetic questions with checkable answers, some of which must be decoded serially; the model `demo` knows them.

There are three families with short parts, and `letters` with long parts. Each has four kinds:

* `parallel`: a block of three to eight independent parts.
* `conclusion`: such a block, and a closing sentence that depends on the branches.
* `single`: a question about one part: serial.
* `chain`: a list in which each part depends on the previous one: serial.

Each question has one right answer. A hash of the question decides whether it is held out from training.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, plain_text, to_json
from infer.evaluation.questions import Question

FAMILIES = ("orders", "records", "machines")  # families with short parts, the default
LONG_FAMILY = "letters"
KINDS = ("parallel", "conclusion", "single", "chain")
HELD_OUT_SHARE = 16  # 1 / HELD_OUT_SHARE of the questions are held out

GOODS = (
    ["pens", "cups", "maps", "lamps", "books", "bags", "hats", "bowls"]
    + ["kites", "drums", "rugs", "clocks", "chairs", "coats", "boots", "gloves"]
)  # fmt: skip
NAMES = (
    ["Ada", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gia", "Hugo"]
    + ["Iris", "Jon", "Kai", "Lena", "Max", "Nora", "Otto", "Pia"]
)  # fmt: skip
CITIES = ["Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Tokyo", "Bern", "Quito", "Perth", "Riga", "Seoul"]
JOBS = [
    "baker",
    "pilot",
    "nurse",
    "judge",
    "tailor",
    "miner",
    "singer",
    "farmer",
    "chemist",
    "painter",
    "lawyer",
    "guard",
]
HOBBIES = ["chess", "tennis", "rowing", "poetry", "fishing", "skiing", "dancing", "hiking", "cooking", "jazz"]
PETS = ["cat", "dog", "parrot", "horse", "turtle", "rabbit", "goat", "hamster"]
MACHINES = tuple("ABCDEFGH")
AND_THE_OLDEST = "and say how old the oldest of them is"


@dataclass(frozen=True)
class Problem:
    """A question with its structured answer."""

    family: str
    kind: str
    question: str
    structure: Structure

    @property
    def answer(self) -> str:
        """Plain text of the right answer."""
        return plain_text(self.structure)

    @property
    def forks(self) -> bool:
        """Return whether the correct answer has a block."""
        return self.branches > 0

    @property
    def branches(self) -> int:
        """Number of branches of the right answer."""
        return sum(len(item.branches) for item in self.structure if isinstance(item, Parallel))


def problem(seed: int, held_out: bool, family: str | None = None, kind: str | None = None) -> Problem:
    """Make the problem of a seed.

    Args:
        seed: seed.
        held_out: whether the question is held out.
        family: family; None: a random one with short parts.
        kind: kind; None: a random one.
    """
    random = Random(seed)
    chosen_family = family or random.choice(FAMILIES)
    chosen_kind = kind or random.choice(KINDS)
    while True:
        question, structure = MAKERS[chosen_family](random, chosen_kind)
        if is_held_out(question) == held_out:
            return Problem(chosen_family, chosen_kind, question, structure)


def record(item: Problem) -> dict[str, Any]:
    """Return a problem as training data (docs/training.md)."""
    return {"messages": [{"role": "user", "content": item.question}], "structure": to_json(item.structure)}


def synthetic_questions(count: int) -> list[Question]:
    """Return held-out problems as questions of an evaluation."""
    return [
        Question(number, f"{item.family}, {item.kind}", (item.question,), forks=item.forks)
        for number, item in enumerate(held_out(count))
    ]


def is_held_out(question: str) -> bool:
    """Return whether a question is held out."""
    return zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0


def held_out(count: int, seed: int = 0, long: bool = False) -> Iterator[Problem]:
    """Yield held-out problems, evenly over families and kinds.

    Args:
        count: number of problems.
        seed: first seed.
        long: whether to use the family with long parts instead of the others.
    """
    families = (LONG_FAMILY,) if long else FAMILIES
    for number in range(count):
        family, kind = families[number % len(families)], KINDS[number // len(families) % len(KINDS)]
        yield problem(seed + number, True, family, kind)


def _block(intro: str, branches: list[Branch], conclusion: str | None) -> Structure:
    items: list[Item] = [Serial(intro), Parallel(branches)]
    if conclusion is not None:
        items.append(Serial(conclusion))
    return tuple(items)


def _count(random: Random) -> int:
    """Return a number of parts from three to eight; small numbers are more frequent."""
    return min(random.randint(3, 8), random.randint(3, 8))


def _orders(random: Random, kind: str) -> tuple[str, Structure]:
    if kind == "chain":
        goods = random.sample(GOODS, random.randint(3, 6))
        prices = [10 * random.randint(1, 4) for _ in goods]
        left = sum(prices) + 10 * random.randint(0, 5)
        bought = "\n".join(f"{good} for ${price}" for good, price in zip(goods, prices, strict=True))
        question = f"I have ${left} and buy, one after the other:\n{bought}\nWhat is left after each?"
        lines = []
        for good, price in zip(goods, prices, strict=True):
            lines.append(f"{good}: ${left} - ${price} = ${left - price}\n")
            left -= price
        return question, (Serial("Each purchase lowers what is left.\n" + "".join(lines)),)
    count = 1 if kind == "single" else _count(random)
    goods = random.sample(GOODS, count)
    titles, orders, texts, totals = [], [], [], []
    quantities = random.sample(range(2, 10), count)
    for quantity, good in zip(quantities, goods, strict=True):
        price = 10 * random.randint(1, 3)
        total = quantity * price
        title = f"{quantity} {good}"
        order, sum_ = f"{title} at ${price}", f"${total}"
        extra = random.random()
        if extra < 0.25:
            order, sum_, total = f"{order}, gift-wrapped", f"${total} + $10 = ${total + 10}", total + 10
        elif extra < 0.5:
            order, sum_, total = f"{order}, with a coupon", f"${total} - $10 = ${total - 10}", total - 10
        titles.append(title)
        orders.append(order)
        texts.append(f"{order}{',' if extra < 0.5 else ''} come to {sum_}.")
        totals.append(total)
    if kind == "single":
        return f"What does this cost?\n{orders[0]}", (Serial(texts[0] + "\n"),)
    branches = [Branch(title, f"{text}\n") for title, text in zip(titles, texts, strict=True)]
    listed = "\n".join(orders)
    if kind == "parallel":
        ask = random.choice(["Price each line.", "What does each line cost?"])
        return f"{ask}\n{listed}", _block("Here is what each line costs.\n", branches, None)
    running, sums = totals[0], f"{titles[0]}: {totals[0]}\n"
    for title, total in zip(titles[1:], totals[1:], strict=True):
        sums += f"{title}: {running} + {total} = {running + total}\n"
        running += total
    conclusion = f"Adding up:\n{sums}The order comes to ${running}.\n"
    ask = random.choice(["Price each line and add up.", "What does each line cost, and what is the total?"])
    return f"{ask}\n{listed}", _block("Here is what each line costs.\n", branches, conclusion)


def _records(random: Random, kind: str) -> tuple[str, Structure]:
    if kind == "chain":
        names = random.sample(NAMES, random.randint(4, 7))
        facts = [f"Above {low} is {high}." for low, high in itertools.pairwise(names)]
        shuffled = random.sample(facts, len(facts))
        question = f"{' '.join(shuffled)} Who is above {names[0]}, one after the other?"
        lines = "".join(f"{fact}\n" for fact in facts)
        return question, (Serial(f"Going up from {names[0]}.\n{lines}At the top is {names[-1]}.\n"),)
    people = _people(random)
    texts = {}
    for p in people:
        texts[p.name] = f"{p.name}, a {p.job} from {p.city}, aged {p.age}, likes {p.hobby}"
        texts[p.name] += f" and has a {p.pet}.\n" if p.pet else ".\n"
    asks = {"single": "Describe just one", "parallel": "Describe", "conclusion": f"Describe these, {AND_THE_OLDEST}"}
    return _about_people(random, people, texts, kind, asks[kind], "Here is what the facts say.\n")


@dataclass(frozen=True)
class _Person:
    name: str
    age: int
    city: str
    job: str
    hobby: str
    pet: str  # empty: none


def _people(random: Random) -> list[_Person]:
    """Make three to eight people whose ages differ in the first digit."""
    names = random.sample(NAMES, _count(random))
    ages = [10 * decade + random.randint(0, 9) for decade in random.sample(range(2, 10), len(names))]
    people = []
    for name, age in zip(names, ages, strict=True):
        city, job, hobby = random.choice(CITIES), random.choice(JOBS), random.choice(HOBBIES)
        people.append(_Person(name, age, city, job, hobby, random.choice(PETS) if random.random() < 0.5 else ""))
    return people


def _facts(people: list[_Person]) -> str:
    lines = [f"{p.name}: {p.job}, {p.city}, {p.age}, {p.hobby}" + (f", {p.pet}" if p.pet else "") for p in people]
    return "Facts:\n" + "\n".join(lines)


def _about_people(
    random: Random, people: list[_Person], texts: dict[str, str], kind: str, ask: str, intro: str
) -> tuple[str, Structure]:
    """Make a question about some of the people with one branch for each, or about one person for `single`."""
    asked = [random.choice(people)] if kind == "single" else random.sample(people, random.randint(3, len(people)))
    question = f"{_facts(people)}\n{ask}:\n" + "\n".join(person.name for person in asked)
    if kind == "single":
        return question, (Serial(texts[asked[0].name]),)
    branches = [Branch(person.name, texts[person.name]) for person in asked]
    oldest = f"The oldest of them is {max(person.age for person in asked)}.\n"
    return question, _block(intro, branches, oldest if kind == "conclusion" else None)


def _letters(random: Random, kind: str) -> tuple[str, Structure]:
    people = _people(random)
    if kind == "chain":
        chain = random.sample(people, random.randint(3, len(people)))
        lines = [f"{chain[0].name}, the {chain[0].job} from {chain[0].city}, is the first to know.\n"]
        for before, person in itertools.pairwise(chain):
            lines.append(f"{before.name} tells {person.name}, the {person.job} from {person.city}.\n")
        question = f"{_facts(people)}\nEach tells the next:\n" + "\n".join(person.name for person in chain)
        return question, (Serial("The news goes round.\n" + "".join(lines)),)
    texts = {}
    for p in people:
        texts[p.name] = f"Dear {p.name}, the {p.hobby} club of {p.city} is looking for a {p.job}. "
        texts[p.name] += f"At {p.age} you are not too old for {p.hobby}"
        texts[p.name] += f", and there is room for your {p.pet}. " if p.pet else ". "
        texts[p.name] += f"Yours, the club of {p.city}.\n"
    ask = "Write a letter to"
    asks = {"single": f"{ask} just one", "parallel": f"{ask} each", "conclusion": f"{ask} each, {AND_THE_OLDEST}"}
    return _about_people(random, people, texts, kind, asks[kind], "Here are the letters.\n")


def _steps(random: Random, value: int, count: int) -> tuple[list[str], list[str], int]:
    """Make steps of arithmetic between 0 and 99, and return their orders, their sums and the result."""
    orders, sums = [], []
    for _ in range(count):
        choices = ["add"] * (value <= 90) + ["take"] * (value >= 9) + ["double"] * (value <= 40)
        kind, amount = random.choice(choices), random.randint(1, 9)
        if kind == "double":
            orders.append("double")
            sums.append(f"{value} x 2 = {2 * value}")
            value *= 2
        elif kind == "add":
            orders.append(f"add {amount}")
            sums.append(f"{value} + {amount} = {value + amount}")
            value += amount
        else:
            orders.append(f"take {amount}")
            sums.append(f"{value} - {amount} = {value - amount}")
            value -= amount
    return orders, sums, value


def _machines(random: Random, kind: str) -> tuple[str, Structure]:
    value = random.randint(1, 20)
    if kind == "chain":
        names = MACHINES[: random.randint(3, 6)]
        parts, lines = [], []
        for number, name in enumerate(names):
            source = f"starts at {value}" if number == 0 else f"takes the result of {names[number - 1]}"
            orders, sums, value = _steps(random, value, random.randint(1, 2))
            parts.append(f"{name} {source}: {', '.join(orders)}")
            lines.append(f"{name}: {', '.join(sums)}, so {value}.\n")
        question = "Run the machines.\n" + "\n".join(parts)
        return question, (Serial("One after the other.\n" + "".join(lines)),)
    count = 1 if kind == "single" else _count(random)
    while True:
        parts, branches, results = [], [], []
        for name in MACHINES[:count]:
            value = random.randint(1, 20)
            orders, sums, result = _steps(random, value, random.randint(1, 4))
            parts.append(f"{name} starts at {value}: {', '.join(orders)}")
            branches.append(Branch(name, f"{name}: {', '.join(sums)}, so {result}.\n"))
            results.append(result)
        highest = max(results)
        if sum(result // 10 == highest // 10 for result in results) == 1:
            break  # the first digit decides which result is the highest
    question = "Run the machines.\n" + "\n".join(parts)
    if kind == "single":
        return question, (Serial(branches[0].text),)
    if kind == "parallel":
        return question, _block("Each on its own.\n", branches, None)
    conclusion = f"The highest result is {highest}.\n"
    return f"{question}\nWhich result is the highest?", _block("Each on its own.\n", branches, conclusion)


MAKERS: dict[str, Callable[[Random, str], tuple[str, Structure]]] = {
    "orders": _orders,
    "records": _records,
    "machines": _machines,
    LONG_FAMILY: _letters,
}
