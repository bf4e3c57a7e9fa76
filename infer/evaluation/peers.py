"""Benchmark of servers that offer OpenAI's interface: the same requests to each, one at a time.

A server of this project is asked in each of its ways, so its serial mode stands beside the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import openai

from aspd_jax.errors import ConfigError, DataError, RequestError
from infer.bench.decisions import MESSAGE, many_questions
from infer.bench.records import parse_object
from infer.decisions import Question
from infer.evaluation.extraction import MODES, Task, spread

TEXTS = ("Explain how a bicycle stays upright.", "Describe a day at the harbour.", "Explain what an index fund is.")
GREEDY: Any = {"temperature": 0, "seed": 0}


@dataclass(frozen=True)
class Server:
    """A server.

    Attributes:
        name: name in the report.
        client: client of the server.
        model: name of its first model.
        ours: whether it is `aspd serve`.
    """

    name: str
    client: openai.OpenAI
    model: str
    ours: bool

    @classmethod
    def connect(cls, named: str, timeout: float) -> Server:
        """Return the server of `NAME=URL`; the URL ends in `/v1`.

        Raises:
            ConfigError: it has another form, or the server offers no model.
        """
        name, separator, url = named.partition("=")
        if not separator or not url.startswith(("http://", "https://")):
            raise ConfigError(f"server: expected NAME=URL, such as llama.cpp=http://127.0.0.1:8080/v1, got {named!r}")
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=timeout)
        try:
            first = next(iter(client.models.list()), None)
        except openai.APIError as error:
            raise ConfigError(f"server {name}: {url}: {error}") from None
        if first is None:
            raise ConfigError(f"server {name}: {url}: expected a model, got none")
        return cls(name, client, first.id, first.owned_by == "aspd")

    @property
    def ways(self) -> Sequence[str]:
        """Return how it decodes fields; serially first. A server of another project has one way, without a name."""
        return MODES if self.ours else ("",)

    def chat(self, text: str, limit: int, way: str, **more: Any) -> tuple[str, int]:
        """Return the greedy answer to a message and its number of tokens.

        Args:
            text: message of the user.
            limit: maximum tokens.
            way: one of `ways`.
            more: further fields of the request.
        """
        extra: dict[str, Any] = {}
        if way:
            extra = {"aspd": {"mode": "serial"} | ({"fields": way} if "response_format" in more else {})}
        messages: list[Any] = [{"role": "user", "content": text}]
        answer = self.client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=limit, extra_body=extra, **GREEDY, **more
        )
        return answer.choices[0].message.content or "", answer.usage.completion_tokens if answer.usage else 0


@dataclass(frozen=True)
class PeerTime:
    """Times of one kind of requests to one server.

    Attributes:
        kind: `text`, `N fields`, or `N decisions`.
        server: name of the server.
        way: how it answered; empty for other projects.
        seconds: seconds of each request; of all decisions together.
        tokens: tokens of each answer.
        right, fields: number of right fields, and of all.
        failed: requests without an answer that could be read.
    """

    kind: str
    server: str
    way: str
    seconds: Sequence[float]
    tokens: Sequence[int]
    right: int = 0
    fields: int = 0
    failed: int = 0


def time_server(
    server: Server,
    tokens: int,
    tasks: Sequence[Sequence[Task]],
    decisions: Sequence[int],
    repeats: int,
    left_out: list[str],
) -> list[PeerTime]:
    """Return the times of a server.

    Args:
        server: the server.
        tokens: maximum tokens of answers in text.
        tasks: tasks by their number of fields.
        decisions: numbers of questions about one message.
        repeats: timed runs of the decisions.
        left_out: list to which an error is appended for each kind of requests that the server does not answer.
    """
    runs: list[tuple[str, Callable[[], list[PeerTime]]]]
    runs = [("text", partial(time_texts, server, tokens))]
    runs += [("fields", partial(time_fields, server, way, group)) for group in tasks for way in server.ways]
    runs += [("decisions", partial(time_decisions, server, count, repeats)) for count in decisions]
    times = []
    for kind, run in runs:
        try:
            times += run()
        except RequestError as error:
            left_out.append(f"{server.name}, {kind}: {error}")
    return times


def time_texts(server: Server, tokens: int) -> list[PeerTime]:
    """Time serial answers of at most `tokens` tokens, after one that is not timed."""
    way = server.ways[0]
    _, *timed = [_timed(partial(server.chat, text, tokens, way)) for text in ("Explain what a text is.", *TEXTS)]
    return [PeerTime("text", server.name, way, [one[0] for one in timed], [one[1][1] for one in timed])]


def time_fields(server: Server, way: str, tasks: Sequence[Task]) -> list[PeerTime]:
    """Time tasks with a JSON schema, after one that is not timed, and compare their values with the right ones."""
    seconds, tokens, right, failed = list[float](), list[int](), 0, 0
    for number, task in enumerate([tasks[-1], *tasks]):
        text = task.prompt if number else f"This is the first one. {task.prompt}"  # no prompt is asked twice
        form = {"name": "record", "strict": True, "schema": task.schema}
        asked = {"response_format": {"type": "json_schema", "json_schema": form}}
        elapsed, (answer, count) = _timed(partial(server.chat, text, 400, way, **asked))
        if not number:
            continue
        values = parse_object(answer)
        seconds.append(elapsed)
        tokens.append(count)
        right += sum(task.right(values or {}).values())
        failed += values is None
    fields = [len(task.gold) for task in tasks]
    return [PeerTime(f"{fields[0]} fields", server.name, way, seconds, tokens, right, sum(fields), failed)]


def time_decisions(server: Server, count: int, repeats: int) -> list[PeerTime]:
    """Time questions about a new message: a request of one token for each, and all in one where that is offered."""
    questions = many_questions(count)

    def each(message: str) -> None:
        for one in questions:
            text = f"{message}\n\n{one.variants(1)[0][0]}"
            server.chat(text, 1, server.ways[0], logprobs=True, top_logprobs=5)

    def together(message: str) -> None:
        body = {"model": server.model, "input": message, "questions": list(map(_body, questions))}
        server.client.post("/decisions", body=body | {"aspd": {"calibration": "none"}}, cast_to=object)

    ways: dict[str, Callable[[str], None]] = {"a request for each": each}
    if server.ours:
        ways["one request"] = together
    times = []
    for way, run in ways.items():
        messages = [f"{number}, {way}: {MESSAGE}" for number in range(1 + repeats)]
        _, *seconds = [_timed(partial(run, message))[0] for message in messages]  # the first compiles
        times.append(PeerTime(f"{count} decisions", server.name, way, seconds, []))
    return times


def _body(question: Question) -> dict[str, Any]:
    """Return a question as `/v1/decisions` reads it."""
    body: dict[str, Any] = {"type": question.kind, "instructions": question.instructions}
    if question.kind == "choice":
        body["choices"] = [{"value": one.value, "description": one.description} for one in question.options]
    elif question.kind == "score":
        body["levels"] = [{"label": one.value, "description": one.description} for one in question.options]
    return body


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a function takes, and its result.

    Raises:
        RequestError: the server refuses the request or fails.
    """
    before = time.perf_counter()
    try:
        result = run()
    except openai.APIError as error:
        raise RequestError(f"expected an answer of the server, got: {error}") from None
    return time.perf_counter() - before, result


def tasks_with(tasks: Sequence[Task], fields: int, limit: int) -> list[Task]:
    """Return tasks with a number of fields, spread over all.

    Raises:
        DataError: there is none.
    """
    found = [task for task in tasks if len(task.gold) == fields and not task.function]
    if not found:
        raise DataError(f"fields: expected a number of fields that a task has, got {fields}")
    return spread(found, limit)


def peer_table(times: Sequence[PeerTime]) -> str:
    """Return the times as a table, kind by kind."""
    lines = ["| requests | server | way | s (median) | fastest - slowest | tokens/s | fields right |", "|---" * 7 + "|"]
    for one in sorted(times, key=lambda time: [other.kind for other in times].index(time.kind)):
        speed = f"{sum(one.tokens) / sum(one.seconds):.1f}" if one.tokens and not one.fields else ""
        right = f"{one.right / one.fields:.1%} of {one.fields}" if one.fields else ""
        right += f", {one.failed} unreadable" if one.failed else ""
        lines.append(
            f"| {one.kind} | {one.server} | {one.way} | {median(one.seconds):.2f} "
            f"| {min(one.seconds):.2f} - {max(one.seconds):.2f} | {speed} | {right} |"
        )
    return "\n".join(lines)
