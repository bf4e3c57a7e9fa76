"""Load test of a server: requests arrive as a Poisson process at a given rate."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import openai

from infer.request import Mode

log = logging.getLogger(__name__)

QUANTILES = (50, 95, 99)
MAX_ROUNDS = 12  # attempts to get a load during which nothing is compiled


@dataclass(frozen=True)
class Load:
    """Result of a load test at one rate and in one mode; times in seconds.

    Attributes:
        mode: `serial` or `adaptive`.
        rate: mean number of requests per second.
        sent, answered, refused, failed: numbers of requests; refused: status 429.
        first, last: median, 95th and 99th percentile of the time to the first and to the last token.
        in_time: number of answers within the target.
        goodput: answers within the target per second.
        content_rate: content tokens per second.
        ideal: median of the answers' ideal speed-up, an upper bound of the speed-up by branches.
        seconds: time from the first request to the last answer.
        medians: median time to the last token of every round, see `median_round`.
        rows: cache rows of the server, the number of requests that it decodes at a time; None: unknown.
    """

    mode: str
    rate: float
    sent: int
    answered: int
    refused: int
    failed: int
    first: tuple[float, ...]
    last: tuple[float, ...]
    in_time: int
    goodput: float
    content_rate: float
    ideal: float
    seconds: float
    medians: tuple[float, ...]
    rows: int | None = None

    @property
    def label(self) -> str:
        """Mode and, if known, number of rows: "adaptive (8 rows)"."""
        return self.mode if self.rows is None else f"{self.mode} ({self.rows} row{'s' * (self.rows > 1)})"

    @property
    def title(self) -> str:
        """Rate and label: "4 requests/s, adaptive (8 rows)"."""
        return f"{self.rate:g} requests/s, {self.label}"


@dataclass(frozen=True)
class Outcome:
    """Result of one request.

    Attributes:
        kind: `answered`, `refused` or `failed`.
        first, last: seconds to the first and to the last token.
        content: content tokens.
        ideal: ideal speed-up.
    """

    kind: str
    first: float = 0.0
    last: float = 0.0
    content: int = 0
    ideal: float = 0.0


async def load(
    url: str,
    key: str,
    model: str,
    questions: Sequence[str],
    mode: Mode,
    rate: float,
    seconds: float,
    target: float,
    max_tokens: int,
    seed: int = 0,
) -> Load:
    """Send requests for a number of seconds, and wait for all answers.

    Args:
        url: base URL of the API, which ends in /v1.
        key: API key; empty: none.
        model: name of the model.
        questions: messages that are sent in turn.
        mode: decoding mode.
        rate: mean number of requests per second.
        seconds: duration in which requests are sent.
        target: seconds to the last token within which an answer is in time.
        max_tokens: maximum tokens of an answer.
        seed: seed of the arrival times.
    """
    random = Random(seed)
    client = openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=600)
    start = time.perf_counter()
    tasks: list[asyncio.Task[Outcome]] = []
    due = 0.0
    while (due := due + random.expovariate(rate)) < seconds or not tasks:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        question = questions[len(tasks) % len(questions)]
        tasks.append(asyncio.create_task(_ask(client, model, question, mode, max_tokens, start + due)))
    answers = await asyncio.gather(*tasks)
    whole = time.perf_counter() - start
    await client.close()
    return _summarise(mode, rate, answers, target, whole)


def _summarise(mode: str, rate: float, answers: Sequence[Outcome], target: float, seconds: float) -> Load:
    """Summarise the results of all requests; for the arguments see `Load` and `load`."""
    good = [answer for answer in answers if answer.kind == "answered"]
    in_time = sum(answer.last <= target for answer in good)
    last = _quantiles([answer.last for answer in good])
    return Load(
        mode=mode,
        rate=rate,
        sent=len(answers),
        answered=len(good),
        refused=sum(answer.kind == "refused" for answer in answers),
        failed=sum(answer.kind == "failed" for answer in answers),
        first=_quantiles([answer.first for answer in good]),
        last=last,
        in_time=in_time,
        goodput=in_time / seconds,
        content_rate=sum(answer.content for answer in good) / seconds,
        ideal=_quantiles([answer.ideal for answer in good])[0],
        seconds=seconds,
        medians=last[:1],
    )


def undisturbed(send: Callable[[], Load], url: str, key: str) -> Load:
    """Repeat a load test until no program is compiled during a round, at most `MAX_ROUNDS` times.

    Args:
        send: runs the load test once.
        url: base URL of the API, which ends in /v1. A server without metrics counts as one that compiles nothing.
        key: API key; empty: none.

    Returns:
        Result of the last round.
    """
    before = _programs(url, key)
    for _ in range(MAX_ROUNDS):
        result, now = send(), _programs(url, key)
        if now == before:
            return result
        log.warning("%s: the server compiled programs during the test; repeating it", result.title)
        before = now
    log.warning("the server compiled programs in each of %d rounds; the times include compilation", MAX_ROUNDS)
    return result


def _programs(url: str, key: str) -> float | None:
    """Return the number of programs that a server has compiled; None if it has no metrics."""
    metrics = Request(f"{url.rstrip('/').removesuffix('/v1')}/metrics", headers={"Authorization": f"Bearer {key}"})
    try:
        with urlopen(metrics, timeout=60) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    match = re.search(r"^aspd_programs_total (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else None


def median_round(rounds: Sequence[Load]) -> Load:
    """Return the round with the median time to the last token; `medians` has the times of all rounds."""
    by_time = sorted(rounds, key=lambda result: result.last[0])
    return replace(by_time[len(rounds) // 2], medians=tuple(result.last[0] for result in rounds))


async def _ask(
    client: openai.AsyncOpenAI, model: str, question: str, mode: Mode, max_tokens: int, due: float
) -> Outcome:
    """Send one request. Times count from its scheduled time, so that delays of the client are included."""
    first = last = ideal = 0.0
    content = 0
    extra: dict[str, Any] = {"aspd": {"mode": mode, "statistics": True}}
    try:
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=max_tokens,
            stream=True, extra_body=extra,
        )  # fmt: skip
        async for chunk in stream:
            now = time.perf_counter() - due
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or now
            if extension := (chunk.model_extra or {}).get("aspd"):
                cost = extension["statistics"]
                content, ideal, last = cost["content_tokens"], cost["ideal_speedup"], now
    except openai.RateLimitError:
        return Outcome("refused")
    except openai.OpenAIError:
        return Outcome("failed")
    return Outcome("answered", first or last, last, content, ideal)


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(np.percentile(values, q)) if values else float("nan") for q in QUANTILES)


def load_table(results: Sequence[Load], target: float) -> str:
    """Return a Markdown table of all results; serial mode at the same rate and rows is the baseline."""
    lines = [
        "| rows | requests/s | mode | answered of sent | refused | first token, ms: p50 / p95 / p99 | last token, ms | "
        f"medians of all rounds | within {target:g} s, per second | content tokens/s | "
        f"ideal speed-up, p50 | last token, p50, serial by adaptive |",
        "|---" * 12 + "|",
    ]
    serial = {(r.rows, r.rate): r for r in results if r.mode == "serial"}
    for r in results:
        first, last = (" / ".join(f"{1000 * value:.0f}" for value in part) for part in (r.first, r.last))
        base = serial.get((r.rows, r.rate))
        gain = f"{base.last[0] / r.last[0]:.2f}x" if base and r.mode != "serial" and r.last[0] else ""
        cells = [
            "" if r.rows is None else str(r.rows),
            f"{r.rate:g}",
            r.mode,
            f"{r.answered} of {r.sent}",
            str(r.refused),
            first,
            last,
            f"{1000 * min(r.medians):.0f} - {1000 * max(r.medians):.0f}",
            f"{r.goodput:.2f}",
            f"{r.content_rate:.0f}",
            f"{r.ideal:.2f}x",
            gain,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_goodput(results: Sequence[Load], target: float) -> str:
    """Return a line for each rate with the highest goodput of each mode."""
    lines = []
    for rate in dict.fromkeys(result.rate for result in results):
        best = {result.mode: result for result in sorted(results, key=_worth) if result.rate == rate}
        goodputs = [f"{best[mode].goodput:.2f} {best[mode].label}" for mode in ("serial", "adaptive")]
        gain = f": {best['adaptive'].goodput / best['serial'].goodput:.2f}x" if best["serial"].goodput else ""
        lines.append(f"{rate:g} requests/s, best within {target:g} s, per second: {', '.join(goodputs)}{gain}")
    return "\n".join(lines)


def _worth(result: Load) -> tuple[float, float]:
    return result.goodput, -result.last[0]


def to_json(results: Sequence[Load]) -> list[dict[str, Any]]:
    """Return results as plain values."""
    return [asdict(result) for result in results]
