"""Thousands of mixed requests to a server of SmolLM2 with its adapters: `python -m tests.helpers.soak 8`.

A round is 250 requests, 24 at a time: whole answers, streams, further turns, answers of a schema, clients that leave in
the middle or at once, bodies that are nonsense or too long, adapters that are added, asked and removed, and one that
cannot be loaded. Each has to end as it should. After every round: memory, open files, threads, requests that the server
still counts, and programs that it has compiled: after warm-up none. It fails if a request ends in another way, if
anything is left, or if memory after the first quarter of the rounds grows by more than 5 %.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx2 as httpx

AT_ONCE = 24
ROUND = 250
ADAPTERS = Path(__file__).parents[2] / "aspd_jax" / "adapters"
BODIES = (b"{", b"[]", b"\xff", b'{"model": "aspd", "messages": 3}', b"x" * 2_000_000)
THINGS = ("sleep better", "learn a language", "plan a garden", "save money", "prepare for an interview", "find friends")
FORMS = ("How can I {}?", "Give me five tips: how do I {}?", "In one sentence: how does one {}?", "A story: I {}.")
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}, "useful": {"type": "boolean"}},
    "required": ["title", "useful"],
    "additionalProperties": False,
}
# What is asked, how often, and the statuses that it may end with; 0: the client did not wait for one.
KINDS = {
    "whole": (30, {200}),
    "stream": (30, {200}),
    "turn": (10, {200}),
    "schema": (6, {200}),
    "leave": (10, {200}),
    "at once": (5, {0, 200}),
    "nonsense": (6, {400, 413}),
    "adapter": (2, {200}),
    "bad adapter": (1, {400}),
}


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


class Client:
    """Requests of every kind to one server."""

    def __init__(self, client: httpx.AsyncClient, url: str, random: Random) -> None:
        self.client, self.url, self.random = client, url, random
        self.loading = asyncio.Lock()

    async def one(self, kind: str) -> int:
        """A request; the status that it ended with."""
        random, body = self.random, self._body()
        match kind:
            case "nonsense":
                return await self._post("chat/completions", random.choice([*BODIES, {**body, "n": 1000}]))
            case "at once":
                try:
                    return await self._post("chat/completions", body, timeout=random.random() * 0.05)
                except httpx.TimeoutException:
                    return 0
            case "stream" | "leave":
                most = random.randint(1, 20) if kind == "leave" else sys.maxsize
                return await self._stream(body, most)
            case "turn":
                said = [{"role": "assistant", "content": "It depends."}, {"role": "user", "content": "On what?"}]
                return await self._post("chat/completions", {**body, "messages": body["messages"] + said})
            case "schema":
                asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
                reply = await self.client.post(
                    f"{self.url}/chat/completions", json={**body, "response_format": asked, "max_tokens": 60}
                )
                (choice,) = reply.json()["choices"]
                if choice["finish_reason"] == "stop":
                    assert set(json.loads(choice["message"]["content"])) == {"title", "useful"}
                return reply.status_code
            case "adapter":
                async with self.loading:  # there is one place for it
                    return max(
                        await self._post("load_lora_adapter", {"lora_name": "guest", "lora_path": "good"}),
                        await self._post("chat/completions", {**body, "model": "guest", "max_tokens": 8}),
                        await self._post("unload_lora_adapter", {"lora_name": "guest"}),
                    )
            case "bad adapter":
                async with self.loading:
                    return await self._post("load_lora_adapter", {"lora_name": "bad", "lora_path": "bad"})
        return await self._post("chat/completions", body)

    def _body(self) -> dict[str, Any]:
        random = self.random
        question = random.choice(FORMS).format(random.choice(THINGS))
        return {
            "model": random.choice(["aspd", "aspd", "other", "smollm2"]),
            "messages": [{"role": "user", "content": question}],
            "max_tokens": random.randint(1, 64),
            "temperature": random.choice([0, 1.0]),
            "logprobs": random.random() < 0.05,
            "aspd": {"mode": random.choice(["adaptive", "serial"]), "stream": random.choice(["text", "branches"])},
        }

    async def _post(self, path: str, body: Any, timeout: float = 300) -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self.client.post(
            f"{self.url}/{path}", content=content, headers={"Content-Type": "application/json"}, timeout=timeout
        )
        return reply.status_code

    async def _stream(self, body: dict[str, Any], most: int) -> int:
        async with self.client.stream("POST", f"{self.url}/chat/completions", json={**body, "stream": True}) as reply:
            lines = 0
            async for _ in reply.aiter_lines():
                lines += 1
                if lines > most:
                    break
            return reply.status_code


async def a_round(url: str, random: Random, outcomes: Counter[str]) -> None:
    """Requests of kinds drawn at random, and how they ended; `!` before what should not be."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def bounded(client: Client, kind: str) -> None:
        async with gate:
            try:
                status = await client.one(kind)
            except httpx.HTTPError as error:
                outcomes[f"! {kind} {type(error).__name__}"] += 1
            else:
                outcomes[f"{'' if status in KINDS[kind][1] else '! '}{kind} {status}"] += 1

    kinds = random.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=ROUND)
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=AT_ONCE)) as connection:
        client = Client(connection, url, random)
        await asyncio.gather(*(bounded(client, kind) for kind in kinds))


def main(rounds: int) -> int:
    """Soak a server; 0 if nothing is left."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("good", "bad"):
            shutil.copytree(ADAPTERS / "smollm2-aspd", Path(folder) / name)
        weights = Path(folder) / "bad" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        command = [sys.executable, "-m", "aspd", "serve", "--model", "smollm2", "--name", "smollm2", "--port", "0"]
        command += ["--adapters", *(f"{name}={ADAPTERS / 'smollm2-aspd'}" for name in ("aspd", "other"))]
        command += ["--adapter-slots", "3", "--adapter-folder", folder, "--max-length", "1024", "--warm-up"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            return _soak(server, rounds)


def _soak(server: subprocess.Popen[str], rounds: int) -> int:
    assert server.stdout is not None
    address = re.search(r"http://\S+:\d+", server.stdout.readline())
    assert address is not None
    url, outcomes, random = address[0], Counter[str](), Random(1)
    began = time.monotonic()
    while httpx.get(f"{url}/health").status_code != 200:
        time.sleep(0.3)
    seen = [left(server.pid, url)]
    print(f"ready after {time.monotonic() - began:.0f} s {seen[0]}", flush=True)
    idle = True
    for number in range(1, rounds + 1):
        asyncio.run(a_round(f"{url}/v1", random, outcomes))
        time.sleep(1)
        health = httpx.get(f"{url}/health").json()
        idle &= health["running"] == health["waiting"] == 0
        seen.append(left(server.pid, url))
        print(f"{number} {time.monotonic() - began:.0f} s {seen[-1]} {health}", flush=True)
    print(dict(sorted(outcomes.items())))
    server.terminate()
    code = server.wait(60)
    settled = seen[max(1, rounds // 4)]
    memory = seen[-1].memory / settled.memory - 1
    files, threads = seen[-1].files - settled.files, seen[-1].threads - settled.threads
    programs = seen[-1].programs - seen[0].programs
    print(f"exit {code}; after warm-up {programs} programs; after the first quarter {memory:+.1%} memory,", end=" ")
    print(f"{files} files and {threads} threads more")
    wrong = any(name.startswith("!") for name in outcomes)
    return int(bool(code or wrong or not idle or programs or memory > 0.05 or files > 2 or threads > 2))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
