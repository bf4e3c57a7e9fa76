"""Thousands of mixed requests to a server of its own: `python -m tests.soak 5`.

A round is 1,000 requests, 60 at a time: whole answers, streams, clients that leave in the middle or at once, bodies
that are nonsense or too long. After every round: memory, open files, threads, and requests that the server still
counts, and programs that it has compiled, which take memory. It fails if anything is left, or if files or threads go on
growing, or memory in rounds that compile nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx2 as httpx

from tests.serving import SERVE
from train.tasks import problem

AT_ONCE = 60
ROUND = 1000
BODIES = (b"{", b"[]", b"\xff", b'{"model": "demo", "messages": 3}', b"x" * 2_000_000)


class Left(NamedTuple):
    """What a server holds: MB of memory, open files, threads; and how many programs it has compiled so far."""

    memory: float
    files: int
    threads: int
    programs: int


def left(pid: int, address: str) -> Left:
    """Of a server, by /proc and by its metrics."""
    told = re.search(r"^aspd_programs_total (\S+)$", httpx.get(f"{address}/metrics").text, re.MULTILINE)
    assert told is not None
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads")}  # type: ignore[index]
    return Left(
        found["VmRSS"] / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), found["Threads"], int(float(told[1]))
    )


async def one(client: httpx.AsyncClient, url: str, number: int, random: Random) -> str:
    """A request of a kind drawn at random; how it ended."""
    kind = random.choices(["whole", "stream", "leave", "nonsense", "at once"], [4, 4, 2, 1, 1])[0]
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": problem(number % 200, True).question}],
        "max_tokens": random.randint(1, 200),
        "temperature": random.choice([0, 1.0]),
        "logprobs": random.random() < 0.05,
        "aspd": {"mode": random.choice(["adaptive", "serial"]), "stream": random.choice(["text", "branches"])},
    }
    if kind == "nonsense":
        content = random.choice([*BODIES, json.dumps({**body, "n": 1000}).encode()])
        reply = await client.post(url, content=content, headers={"Content-Type": "application/json"})
        return f"{kind} {reply.status_code // 100}xx"
    if kind == "at once":
        try:
            reply = await client.post(url, json=body, timeout=random.random() * 0.05)
            return f"{kind} {reply.status_code}"
        except httpx.TimeoutException:
            return f"{kind} left"
    if kind == "whole":
        return f"{kind} {(await client.post(url, json=body)).status_code}"
    async with client.stream("POST", url, json={**body, "stream": True}) as reply:
        lines, most = 0, random.randint(1, 20)
        async for _ in reply.aiter_lines():
            lines += 1
            if kind == "leave" and lines > most:
                break
        return f"{kind} {reply.status_code}"


async def a_round(url: str, random: Random, outcomes: Counter[str]) -> None:
    """1,000 requests, and how they ended."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def bounded(client: httpx.AsyncClient, number: int) -> None:
        async with gate:
            try:
                outcomes[await one(client, url, number, random)] += 1
            except httpx.HTTPError as error:
                outcomes[type(error).__name__] += 1

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=AT_ONCE)) as client:
        await asyncio.gather(*(bounded(client, number) for number in range(ROUND)))


def main(rounds: int) -> int:
    """Soak a server; 0 if nothing is left."""
    command = [*SERVE, "--batch", "8", "--max-length", "1024"]
    server = subprocess.Popen([*command, "--max-waiting", "256"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.search(r"http://\S+:\d+", server.stdout.readline())
    assert address is not None
    url, outcomes, random = address[0], Counter[str](), Random(1)
    while httpx.get(f"{url}/health").status_code != 200:
        time.sleep(0.3)
    seen: list[Left] = []
    began = time.monotonic()
    idle = True
    for number in range(rounds + 1):  # the first one compiles
        asyncio.run(a_round(f"{url}/v1/chat/completions", random, outcomes))
        time.sleep(1)
        health = httpx.get(f"{url}/health").json()
        idle &= health["running"] == health["waiting"] == 0
        seen.append(left(server.pid, url))
        print(f"{number} {time.monotonic() - began:.0f} s {seen[-1]} {health}", flush=True)
    print(dict(sorted(outcomes.items())))
    server.terminate()
    code = server.wait(60)
    quiet = [(one, other) for one, other in pairwise(seen) if one.programs == other.programs]
    memory = sum(other.memory - one.memory for one, other in quiet)
    files, threads = seen[-1].files - seen[1].files, seen[-1].threads - seen[1].threads
    print(f"exit {code}; {files} files and {threads} threads more")
    print(f"{memory:.0f} MB more in the {len(quiet)} rounds without new programs")
    errors = [name for name in outcomes if name.endswith(("500", "5xx", "Error"))]
    grown = memory > 0.1 * seen[1].memory or files > 2 or threads > 2
    return int(bool(code or errors or not idle or grown or not quiet))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
