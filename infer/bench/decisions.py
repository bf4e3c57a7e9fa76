"""Benchmark of decisions: all questions in one pass, a request for each, and serial JSON of all answers, in one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from aspd_jax.tables import markdown_table
from infer.decisions import Option, Question
from infer.engine import Engine
from infer.request import PromptTooLong, Request, SamplingParams
from infer.scheduling.handle import Handle

MESSAGE = (
    "Hello, our nightly export has failed three nights in a row, always at 02:10 with the error E-4127. We are on the "
    "Pro plan with 60 users, and our accountants need the file by eight each morning. Your colleague said on Monday "
    "that a fix was on its way, but nothing has changed, and nobody has answered since. We were also billed twice for "
    "October. If this goes on, we will move to another provider at the end of the month. Mara Lindqvist, Fjordline"
)
TEAMS = (Option("engineering", "repairs what is broken"), Option("billing", "handles charges"), Option("success"))
QUESTIONS = (
    Question("predicate", "Does the customer report a failure?"),
    Question("predicate", "Does the customer threaten to leave?"),
    Question("predicate", "Was the customer billed wrongly?"),
    Question("predicate", "Has the customer written before?"),
    Question("choice", "Which team owns this message?", TEAMS),
    Question("choice", "Which plan has the customer?", (Option("Free"), Option("Pro"), Option("Enterprise"))),
    Question("score", "How upset is the customer?", (Option("calm"), Option("annoyed"), Option("angry"))),
    Question("score", "How urgent is the message?", (Option("can wait"), Option("this week"), Option("today"))),
)
WHOLE, ORDERS = "one pass", "one pass, all orders"
EACH, SERIAL = "a request for each", "serial JSON of all answers"


@dataclass(frozen=True)
class DecisionTime:
    """Time of one way to answer questions, from an empty cache.

    Attributes:
        questions: number of questions.
        way: how they are answered.
        tokens: tokens that are fed, cached ones excluded.
        steps: steps, those of prompts included.
        seconds: median over the runs.
        fastest, slowest: extremes of `seconds`.
    """

    questions: int
    way: str
    tokens: int
    steps: int
    seconds: float
    fastest: float
    slowest: float


def many_questions(count: int) -> list[Question]:
    """Return different questions about `MESSAGE`: `QUESTIONS` in turn, with the number of their turn."""
    turns = ((turn, asked) for turn in range(1, count + 1) for asked in QUESTIONS)
    marked = (
        Question(q.kind, f"{q.instructions} ({turn})" if turn > 1 else q.instructions, q.options) for turn, q in turns
    )
    return [question for _, question in zip(range(count), marked, strict=False)]


def run_requests(engine: Engine, groups: Sequence[Sequence[Request]]) -> tuple[int, int]:
    """Run groups of requests one after the other; return the tokens that are fed, and the steps with those of prompts.

    The requests of a group are submitted together.
    """
    handles, steps = list[Handle](), 0
    for group in groups:
        handles += [engine.submit_checked(request) for request in group]
        while engine.step():
            steps += engine.last_chunk.steps
    stats = [handle.wait().stats for handle in handles]
    fed = sum(one.prompt_tokens - one.reused_tokens + one.scored_tokens + one.generated_tokens for one in stats)
    return fed, steps


def serial_request(engine: Engine, questions: Sequence[Question]) -> Request:
    """Return the request of one JSON object with the answers to all questions, in serial mode."""
    lines, properties = [], {}
    for number, question in enumerate(questions, 1):
        options = "; ".join(option.text for option in question.options)
        lines.append(f"q{number}: {question.instructions} {f'One of: {options}' if options else 'true or false'}")
        values = [str(option.value) for option in question.options]
        properties[f"q{number}"] = {"enum": values} if values else {"type": "boolean"}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    text = "\n".join([MESSAGE, "", "Answer all questions as JSON.", *lines])
    params = SamplingParams(json_schema=schema, max_new_tokens=24 * len(questions) + 16)
    return engine.check([{"role": "user", "content": text}], params, "serial")


def decision_times(engine: Engine, count: int, repeats: int) -> list[DecisionTime]:
    """Time all ways to answer questions, in alternation, after a run of each that compiles.

    Args:
        engine: engine; its rows are the requests that run together.
        count: number of questions.
        repeats: timed runs.
    """
    questions = many_questions(count)
    single = [engine.ask(MESSAGE, [question], "none").asked[0].request for question in questions]
    whole, orders = (engine.ask(MESSAGE, questions, kind).asked[0].request for kind in ("none", "orders"))
    ways = {WHOLE: [[whole]], ORDERS: [[orders]], EACH: [[one] for one in single]}
    if engine.max_batch > 1:
        ways[f"{EACH}, {engine.max_batch} together"] = [single]
    with suppress(PromptTooLong):  # it is left out
        ways[SERIAL] = [[serial_request(engine, questions)]]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    works = {}
    for number in range(1 + repeats):
        for way, groups in ways.items():
            engine.reset_cache()
            before = time.perf_counter()
            works[way] = run_requests(engine, groups)
            if number:
                seconds[way].append(time.perf_counter() - before)
    return [DecisionTime(count, way, *works[way], median(own), min(own), max(own)) for way, own in seconds.items()]


def decision_table(times: Sequence[DecisionTime], head: bool = True) -> str:
    """Return the times of one number of questions as rows of a table; `head`: whether its head is above them."""
    first = next(time.seconds for time in times if time.way == WHOLE)
    rows = [
        {
            "questions": one.questions,
            "": one.way,
            "tokens fed": f"{one.tokens:,}",
            "steps": one.steps,
            "s": f"{one.seconds:.3f}",
            "fastest - slowest": f"{one.fastest:.3f} - {one.slowest:.3f}",
            "of one pass": f"{one.seconds / first:.2f}x",
        }
        for one in times
    ]
    return markdown_table(rows, head)
