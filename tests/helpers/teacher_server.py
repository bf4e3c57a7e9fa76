"""Endpoint of OpenAI's chat completions with configurable faults, for tests of the pipeline."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# A reply: HTTP status, and the text of the message (or the whole body where the status is no success).
Reply = tuple[int, str]


@dataclass
class TeacherServer:
    """Serves in a thread of its own, on loopback.

    Attributes:
        answer: makes a reply from the body of a request and how many times it was asked before.
        delay: seconds that a reply takes.
        keys: of requests, as their `Authorization` header has them.
        seen: how often each prompt was asked; `together`: most requests at a time; `bodies`: all of them.
    """

    answer: Callable[[dict[str, Any], int], Reply]
    delay: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    together: int = 0
    keys: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> TeacherServer:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def serve() -> None:
            self._stop = asyncio.Event()
            server = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=2048)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            ready.set()
            await self._stop.wait()
            server.close()
            talks = asyncio.all_tasks() - {asyncio.current_task()}
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)

        self._open = 0
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(serve()), daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.keys += [
                    line[15:] for line in head.decode().split("\r\n") if line.lower().startswith("authorization")
                ]
                size = next(
                    int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")
                )
                body = json.loads(await reader.readexactly(size))
                self._open += 1
                self.together = max(self.together, self._open)
                await asyncio.sleep(self.delay)
                status, text = self._reply(body)
                self._open -= 1
                if status == 0:  # as if the endpoint had died
                    break
                payload = text.encode()
                lines = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
                lines += "retry-after-ms: 1\r\n" if status == 429 else ""
                writer.write(lines.encode() + b"\r\n" + payload)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _reply(self, body: dict[str, Any]) -> Reply:
        prompt = body["messages"][-1]["content"]
        self.bodies.append(body)
        before = self.seen[prompt]
        self.seen[prompt] += 1
        status, text = self.answer(body, before)
        if status != 200:
            return status, text
        message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        whole = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return 200, json.dumps(whole | {"choices": [message], "usage": usage})


def section(prompt: str, name: str) -> str:
    """What stands between two tags of a prompt."""
    return prompt.split(f"<{name}>\n", 1)[1].split(f"\n</{name}>", 1)[0]
