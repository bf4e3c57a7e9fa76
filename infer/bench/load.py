"""Load on a server: requests that arrive at random at a given rate, whether or not earlier ones have been answered."""

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
MAX_ROUNDS = 12  # of a load, until one is undisturbed


@dataclass(frozen=True)
class Load:
    """What became of the requests of one rate and mode; seconds.

    Attributes:
        mode: `serial` or `adaptive`.
        rate: requests that arrive per second, mean.
        sent, answered, refused, failed: requests; refused: 429.
        first, last: request to first and to last token: median, 95th and 99th percentile of those answered.
        in_time: answers within the target.
        goodput: answers within the target per second.
        content_rate: tokens of plain text per second.
        ideal: median of the answers' ideal speed-up, which bounds what parallel branches can gain.
        seconds: from the first request to the last answer.
        medians: to the last token, of every round: see `middle`.
        rows: of the server, which answers so many requests at a time; None: not known.
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
    def who(self) -> str:
        """The mode, and the server where it is known: "adaptive (8 rows)"."""
        return self.mode if self.rows is None else f"{self.mode} ({self.rows} row{'s' * (self.rows > 1)})"

    @property
    def title(self) -> str:
        """Such as "4 requests/s, adaptive (8 rows)"."""
        return f"{self.rate:g} requests/s, {self.who}"


@dataclass(frozen=True)
class Outcome:
    """What became of one request: `answered`, `refused` or `failed`; seconds to its first and last token."""

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
    """Send requests for so many seconds, and wait for all answers.

    Args:
        questions: taken in turn.
        target: seconds to the last token that count as in time.
    """
    random = Random(seed)
    client = openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=600)
    begun = time.perf_counter()
    tasks: list[asyncio.Task[Outcome]] = []
    due = 0.0
    while (due := due + random.expovariate(rate)) < seconds or not tasks:
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        question = questions[len(tasks) % len(questions)]
        tasks.append(asyncio.create_task(_ask(client, model, question, mode, max_tokens, begun + due)))
    answers = await asyncio.gather(*tasks)
    whole = time.perf_counter() - begun
    await client.close()
    return _load_of(mode, rate, answers, target, whole)


def _load_of(mode: str, rate: float, answers: Sequence[Outcome], target: float, seconds: float) -> Load:
    """Figures of what became of every request; for the arguments see `Load` and `load`."""
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
    """Send a load until, in a round of it, nothing was compiled; where programs were in all, the last round.

    Args:
        url: of the server's interface, which ends in /v1; one that does not tell what it compiled is taken to have
            compiled nothing.
    """
    before = _programs(url, key)
    for _ in range(MAX_ROUNDS):
        found, now = send(), _programs(url, key)
        if now == before:
            return found
        log.warning("%s: programs were compiled meanwhile; sent again", found.title)
        before = now
    log.warning("no round of %d was undisturbed; the figures hold compiling", MAX_ROUNDS)
    return found


def _programs(url: str, key: str) -> float | None:
    """How many programs a server has compiled; None: it does not tell."""
    metrics = Request(f"{url.rstrip('/').removesuffix('/v1')}/metrics", headers={"Authorization": f"Bearer {key}"})
    try:
        with urlopen(metrics, timeout=60) as answer:
            told = answer.read().decode()
    except OSError:
        return None
    found = re.search(r"^aspd_programs_total (\S+)$", told, re.MULTILINE)
    return float(found[1]) if found else None


def middle(rounds: Sequence[Load]) -> Load:
    """Of several rounds of one load, that with the middle median time to the last token; and all their medians."""
    by_time = sorted(rounds, key=lambda of: of.last[0])
    return replace(by_time[len(rounds) // 2], medians=tuple(of.last[0] for of in rounds))


async def _ask(
    client: openai.AsyncOpenAI, model: str, question: str, mode: Mode, max_tokens: int, due: float
) -> Outcome:
    """One request; times count from when it was due, so that a client that lags hides nothing."""
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
            if told := (chunk.model_extra or {}).get("aspd"):
                cost = told["statistics"]
                content, ideal, last = cost["content_tokens"], cost["ideal_speedup"], now
    except openai.RateLimitError:
        return Outcome("refused")
    except openai.OpenAIError:
        return Outcome("failed")
    return Outcome("answered", first or last, last, content, ideal)


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(np.percentile(values, q)) if values else float("nan") for q in QUANTILES)


def load_table(found: Sequence[Load], target: float) -> str:
    """Markdown: every rate in serial mode, the baseline, beside adaptive mode of the same server."""
    lines = [
        "| rows | requests/s | mode | answered of sent | refused | first token, ms: p50 / p95 / p99 | last token, ms | "
        f"medians of all rounds | within {target:g} s, per second | content tokens/s | "
        f"ideal speed-up, p50 | last token, p50, serial by adaptive |",
        "|---" * 12 + "|",
    ]
    serial = {(of.rows, of.rate): of for of in found if of.mode == "serial"}
    for of in found:
        first, last = (" / ".join(f"{1000 * value:.0f}" for value in part) for part in (of.first, of.last))
        base = serial.get((of.rows, of.rate))
        gain = f"{base.last[0] / of.last[0]:.2f}x" if base and of.mode != "serial" and of.last[0] else ""
        cells = [
            "" if of.rows is None else str(of.rows),
            f"{of.rate:g}",
            of.mode,
            f"{of.answered} of {of.sent}",
            str(of.refused),
            first,
            last,
            f"{1000 * min(of.medians):.0f} - {1000 * max(of.medians):.0f}",
            f"{of.goodput:.2f}",
            f"{of.content_rate:.0f}",
            f"{of.ideal:.2f}x",
            gain,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_goodput(found: Sequence[Load], target: float) -> str:
    """For every rate, the best server of each mode: how many answers within the target it gives per second."""
    lines = []
    for rate in dict.fromkeys(of.rate for of in found):
        best = {of.mode: of for of in sorted(found, key=_worth) if of.rate == rate}
        told = [f"{best[mode].goodput:.2f} {best[mode].who}" for mode in ("serial", "adaptive")]
        gain = f": {best['adaptive'].goodput / best['serial'].goodput:.2f}x" if best["serial"].goodput else ""
        lines.append(f"{rate:g} requests/s, best within {target:g} s, per second: {', '.join(told)}{gain}")
    return "\n".join(lines)


def _worth(of: Load) -> tuple[float, float]:
    return of.goodput, -of.last[0]


def to_json(found: Sequence[Load]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(of) for of in found]
