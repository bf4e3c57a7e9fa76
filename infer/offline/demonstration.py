"""Demonstration on a terminal: a record, a list and decisions, each beside serial decoding with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aspd_jax.language_model import LanguageModel
from aspd_jax.pictures import rendered
from aspd_jax.progress import waiting
from infer.answers.answer import Result, content_ids
from infer.bench.records import Run, parse_object, record_prompt, run_compiled
from infer.decisions import Decision, Option, Question
from infer.engine import Engine
from infer.request import Fields, SamplingParams

MAX_LENGTH = 512  # tokens; a longer cache would need a second set of programs
ORDER = (
    "Hello, this is Petra Lindqvist from Malmö. Please send me 12 of your linen napkins at 4.50 euros each. "
    "No hurry with delivery. I will pay by invoice as usual."
)
ORDER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"}, "item": {"type": "string"}, "quantity": {"type": "integer"},
        "unit_price": {"type": "number"}, "currency": {"enum": ["EUR", "USD", "GBP"]}, "express": {"type": "boolean"},
        "city": {"type": "string"}, "payment": {"enum": ["card", "invoice", "cash"]},
    },
    "required": ["customer", "item", "quantity", "unit_price", "currency", "express", "city", "payment"],
    "additionalProperties": False,
}  # fmt: skip
LIST_QUESTION = "Give me five tips for a job interview."


def _choice(instructions: str, *options: str) -> Question:
    return Question("choice", instructions, tuple(map(Option, options)))


# Questions about the order that a model of 0.5 billion parameters answers; it rarely takes the second of three options.
QUESTIONS = (
    _choice("What is ordered?", "lamps", "chairs", "napkins"),
    _choice("How will the customer pay?", "by invoice", "by card", "in cash"),
    _choice("Which city is named?", "Paris", "London", "Malmö"),
    _choice("Which currency is named?", "dollars", "pounds", "euros"),
    _choice("In which language is the message?", "English", "German", "French"),
    _choice("How many pieces are ordered?", "12", "4", "50"),
    _choice("What is the tone?", "angry", "sad", "friendly"),
    _choice("Who writes?", "Petra", "Anna", "John"),
)


class Cost(NamedTuple):
    """Cost of a part of the demonstration in one mode.

    Attributes:
        steps: steps after the prompts.
        seconds: wall time, prompts included.
    """

    steps: int
    seconds: float


class Compared(NamedTuple):
    """A part of the demonstration, with its cost serially and with parallel branches."""

    name: str
    serial: Cost
    parallel: Cost


def order_prompt() -> list[dict[str, str]]:
    """Return the messages that ask for the fields of the order."""
    return [{"role": "user", "content": record_prompt(ORDER, ORDER_SCHEMA)}]


def demonstrate(lm: LanguageModel, max_length: int | None) -> None:
    """Decode a record, a list and decisions, and print them with their steps and seconds.

    Args:
        lm: a chat model.
        max_length: maximum tokens of prompt and answer; None: 512.
    """
    console = Console()
    engine = Engine(lm, max_length=max_length or MAX_LENGTH, max_batch=1)
    parts = (demonstrate_record, demonstrate_list, demonstrate_decisions)
    _print_totals(console, [part(console, engine) for part in parts])


def demonstrate_record(console: Console, engine: Engine) -> Compared:
    """Decode the fields of an order serially, exactly and in parallel."""
    console.rule("A record: the schema names its fields, which are decoded side by side")
    console.print(Text(ORDER, style="bold"))
    orders: tuple[Fields, ...] = ("serial", "exact", "parallel")

    def decode(order: Fields) -> Result:
        params = SamplingParams(max_new_tokens=200, json_schema=ORDER_SCHEMA, fields=order)
        return engine.generate([order_prompt()], params, "serial")[0]

    results = {order: _measure(engine, partial(decode, order)) for order in orders}
    table = Table("field", *orders)
    values = {order: parse_object(result.text) or {} for order, (result, _) in results.items()}
    for field in ORDER_SCHEMA["properties"]:
        found = [json.dumps(own[field], ensure_ascii=False) if field in own else "" for own in values.values()]
        table.add_row(field, *found)
    table.add_section()
    costs = {order: Cost(result.stats.steps, seconds) for order, (result, seconds) in results.items()}
    _add_costs(table, [costs[order] for order in orders])
    console.print(table)
    console.print("exact: the serial answer, token for token; the parallel values are its draft.", style="dim")
    return Compared("one record, exact fields", costs["serial"], costs["exact"])


def demonstrate_list(console: Console, engine: Engine) -> Compared:
    """Answer a question with a list in parallel, then serially with the same content."""
    console.rule("A list: first its headings, then all items side by side")
    console.print(Text(LIST_QUESTION, style="bold"))
    messages = [{"role": "user", "content": LIST_QUESTION}]
    params = SamplingParams(max_new_tokens=400, repetition_penalty=1.05)
    result, seconds = _measure(engine, lambda: engine.generate([messages], params, "adaptive")[0])
    forced = params.saying(content_ids(engine.config, result))
    same, longer = _measure(engine, lambda: engine.generate([messages], forced, "serial")[0])
    console.print(rendered(result.structure))
    costs = Cost(same.stats.steps, longer), Cost(result.stats.steps, seconds)
    table = Table("the same text", "serial", "parallel")
    _add_costs(table, costs)
    console.print(table)
    return Compared("one list", *costs)


def demonstrate_decisions(console: Console, engine: Engine) -> Compared:
    """Answer questions about a text one after the other, then all in one pass."""
    console.rule("Decisions: questions about one text, each answered alone, with probabilities")
    console.print(Text(ORDER, style="bold"))
    asked_texts = [question.variants(1)[0] for question in QUESTIONS]

    def serially() -> list[Result]:
        return [_answer_label(engine, text, labels) for text, labels in asked_texts]

    def together() -> tuple[list[Decision], int]:
        asked = engine.ask(ORDER, QUESTIONS, "none")
        results = [engine.submit_checked(one.request).wait() for one in asked.asked]
        decisions = engine.read_decisions(asked, [result.scores for result in results])
        return decisions, sum(result.stats.steps for result in results)

    answers, longer = _measure(engine, serially)
    (decisions, steps), seconds = _measure(engine, together)
    table = Table("question", "one request each", "one pass")
    for question, (_, labels), answer, decision in zip(QUESTIONS, asked_texts, answers, decisions, strict=True):
        options = [option.text for option in question.options]
        chosen = f"{options[decision.best]}, {100 * decision.confidence:.0f} %"
        table.add_row(question.instructions, options[labels.index(answer.text)], chosen)
    table.add_section()
    costs = Cost(sum(answer.stats.steps for answer in answers), longer), Cost(steps, seconds)
    _add_costs(table, costs)
    console.print(table)
    return Compared("eight decisions", *costs)


def _answer_label(engine: Engine, question: str, labels: Sequence[str]) -> Result:
    """Answer a question about the order with one of its labels, as a request of its own."""
    prompt = [{"role": "user", "content": f"{ORDER}\n\n{question}"}]
    return engine.generate([prompt], SamplingParams(choices=tuple(labels), max_new_tokens=8), "serial")[0]


def _measure(engine: Engine, run: Callable[[], Run]) -> tuple[Run, float]:
    """Run while a wait is shown; see `run_compiled`."""
    with waiting("compiling and answering"):
        return run_compiled(engine, run)


def _add_costs(table: Table, costs: Sequence[Cost]) -> None:
    """Add rows of steps, seconds and speed-ups; the first cost is that of serial decoding."""
    table.add_row("steps", *(str(cost.steps) for cost in costs))
    table.add_row("seconds", *(f"{cost.seconds:.2f}" for cost in costs))
    table.add_row("speed-up", "", *(f"{costs[0].seconds / cost.seconds:.2f}x" for cost in costs[1:]))


def _print_totals(console: Console, parts: Sequence[Compared]) -> None:
    """Print the steps and seconds of all parts, and their sums."""
    console.rule("All together")
    table = Table("", "serial: steps", "seconds", "parallel: steps", "seconds", "speed-up")
    sums = (Cost(*map(sum, zip(*costs, strict=True))) for costs in zip(*(part[1:] for part in parts), strict=True))
    for name, serial, parallel in (*parts, Compared("together", *sums)):
        cells = (serial.steps, f"{serial.seconds:.2f}", parallel.steps, f"{parallel.seconds:.2f}")
        table.add_row(name, *map(str, cells), f"{serial.seconds / parallel.seconds:.2f}x")
    console.print(table)
    console.print(
        "One run of each, without compilation, batch 1, prompts included. Steps are those after the prompt. A step "
        "with branches feeds more tokens, so it takes longer, above all on a CPU (docs/when_it_pays.md).",
        style="dim",
    )
