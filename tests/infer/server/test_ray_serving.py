"""Replicas of the embedded model behind one address, on a local Ray cluster, and the choice of a replica."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx2 as httpx
import pytest

import aspd
from aspd_jax import load_model
from aspd_jax.errors import RequestError
from aspd_jax.ray_pool import RayOptions, cluster
from infer import Engine
from infer.server.config import ServerConfig
from infer.server.prefix_router import PREFIX, conversation_key, ranked
from infer.server.ray_serving import NAME, Replicas, make_application
from tests.helpers.ray_workers import descendants, ended
from tests.helpers.serving import ask, serving

REPLICA = "x-aspd-replica"
NUMBERED = "Question {}: what is the price?"
CONVERSATIONS = [[{"role": "user", "content": NUMBERED.format(number)}] for number in range(8)]
VERSION = {"version": "1", "_internal": True}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "demo"} | fields).encode()


def test_turns_of_a_conversation_share_a_key() -> None:
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "A?"}
    more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "B?"}]
    chat = conversation_key(body(messages=[system, first]))
    assert conversation_key(body(messages=[system, first, *more], temperature=1.0)) == chat
    assert conversation_key(body(instructions="x", input="A?")) == conversation_key(body(instructions="x", input="A?"))
    text = "x" * PREFIX
    assert conversation_key(body(prompt=text)) == conversation_key(body(prompt=text + "y"))
    assert conversation_key(body(prompt=[*range(PREFIX)])) == conversation_key(body(prompt=[*range(PREFIX + 1)]))
    keys = [
        chat,
        conversation_key(body(messages=[first])),
        conversation_key(body(messages=[system, {"role": "user", "content": "B?"}])),
        conversation_key(body(model="other", messages=[system, first])),
        conversation_key(body(instructions="x", input="A?")),
        conversation_key(body(prompt=text)),
        *(conversation_key(other) for other in (b"", b"{", b"[]", b"\xff", b"[" * 100_000)),
    ]
    assert len(set(keys)) == len(keys)


def test_a_replica_that_ends_moves_only_its_conversations() -> None:
    names, keys = ["a", "b", "c"], [str(number) for number in range(3000)]
    before = {key: names[ranked(key, names)[0]] for key in keys}
    assert all(900 < count < 1100 for count in Counter(before.values()).values())
    assert {key: names[::-1][ranked(key, names[::-1])[0]] for key in keys} == before
    after = {key: ["a", "b"][ranked(key, ["a", "b"])[0]] for key in keys}
    assert all(after[key] == name for key, name in before.items() if name != "c")
    moved = Counter(after[key] for key, name in before.items() if name == "c")
    assert min(moved.values()) > 400
    assert all(after[key] == names[ranked(key, names)[1]] for key, name in before.items() if name == "c")


def test_options(capsys: Any) -> None:
    assert Replicas.parse("3") == (3, 3) and Replicas.parse("1:4") == (1, 4)
    for text in ("", "0", "4:1", "1:", ":2", "x", "1:2:3", "-1"):
        with pytest.raises(RequestError, match="--replicas: expected"):
            Replicas.parse(text)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve two replicas; a stop signal ends the server and its cluster."""
    pytest.importorskip("ray")
    with Server("--replicas", "2") as server:
        yield server.url
        assert server.stop() == 0, server.said


class Server:
    def __init__(self, *more: str) -> None:
        words = [sys.executable, "-m", "aspd", "serve", "--model", "demo", "--port", "0", "--warm-up", "none"]
        words += ["--batch", "2", "--max-length", "1024", "--max-new-tokens", "400", "--max-waiting", "4"]
        self.process = subprocess.Popen(
            [*words, "--ray", "local", *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.said: list[str] = []
        self._reader = threading.Thread(target=self.said.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        assert "(ready)" in line, (line, self.said)
        self.url = line.split()[1].rstrip("/")
        self.processes = descendants(self.process.pid)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        assert ended(self.processes)
        return code


def chat(url: str, messages: Any, **more: Any) -> httpx.Response:
    request = ask() | {"messages": messages} | more
    return httpx.post(f"{url}/v1/chat/completions", json=request, timeout=300)


class Streams:
    """Streamed answers of two replicas, both begun; a conversation of each is chosen."""

    def __init__(self, url: str, **more: Any) -> None:
        homes = [chat(url, messages, max_tokens=1).headers[REPLICA] for messages in CONVERSATIONS]
        self.names = set(homes)
        assert len(self.names) == 2
        self._request = ask(ignore_eos=True, stream=True, temperature=0) | more
        self._lines: dict[str, list[str]] = {}
        self._url, self._begun = url, threading.Barrier(3)
        self.threads = [threading.Thread(target=self._follow, args=(homes.index(name),)) for name in self.names]
        for thread in self.threads:
            thread.start()
        self._begun.wait(120)

    def _follow(self, number: int) -> None:
        request = self._request | {"messages": CONVERSATIONS[number]}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=request, timeout=300) as stream:
            lines = stream.iter_lines()
            seen = self._lines[stream.headers[REPLICA]] = [next(lines)]
            self._begun.wait(120)
            seen += [line for line in lines if line]

    def check_completed(self) -> None:
        """Wait for the ends of both answers, which have to be whole."""
        for thread in self.threads:
            thread.join(300)
        assert set(self._lines) == self.names
        for lines in self._lines.values():
            assert lines[-1] == "data: [DONE]"
            last = [json.loads(line[6:])["choices"][0] for line in lines[:-1] if line.startswith("data: {")][-1]
            assert last["finish_reason"] == "length"


@pytest.mark.slow
def test_two_replicas_answer(address: str) -> None:
    """Check concurrent answers against one server; the turns of a conversation go to one replica and its cache."""
    conversations = [[{"role": "user", "content": ask(number)["messages"][0]["content"]}] for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda messages: chat(address, messages), conversations))
    assert [answer.status_code for answer in answers] == [200] * 6
    names = sorted({answer.headers[REPLICA] for answer in answers})
    assert len(names) == 2
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    with serving(Engine(load_model("demo"), max_length=1024, max_batch=2)) as one:
        assert [chat(one.url, m).json()["choices"][0]["message"]["content"] for m in conversations] == texts
    sizes = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
    for messages, text, size in zip(conversations, texts, sizes, strict=True):
        replica = names[ranked(conversation_key(body(messages=messages)), names)[0]]
        assert chat(address, messages).headers[REPLICA] == replica, "its home, now that there is room"
        follow = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Again?"}]
        turn = chat(address, follow, max_tokens=4)
        assert turn.headers[REPLICA] == replica
        assert turn.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= size - 2, "all of the first turn's"


@pytest.mark.slow
def test_streams_and_refusals_are_relayed(address: str) -> None:
    whole = chat(address, ask()["messages"]).json()["choices"][0]["message"]["content"]
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=ask(stream=True), timeout=300) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream") and stream.headers["x-request-id"]
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and len(lines) > 4
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole
    assert httpx.get(f"{address}/v1/models", timeout=60).json()["data"][0]["id"] == "demo"
    assert httpx.get(f"{address}/health", timeout=60).json()["status"] == "ready"
    assert chat(address, [], model="demo").status_code == 400
    assert chat(address, ask()["messages"], model="other").status_code == 404
    large = httpx.post(f"{address}/v1/chat/completions", content=b" " * ((1 << 20) + 1), timeout=60)
    assert large.status_code == 413 and large.json()["error"]["code"] == "request_too_large"
    parts = (b" " * 65536 for _ in range(17))  # without a length
    assert httpx.post(f"{address}/v1/chat/completions", content=parts, timeout=60).status_code == 413


@pytest.mark.slow
def test_answers_end_before_the_server_does() -> None:
    """Check that both replicas drain: streams in progress are completed. A dead replica is replaced."""
    pytest.importorskip("ray")
    with Server("--replicas", "2") as server:
        streams = Streams(server.url, max_tokens=300)
        server.process.send_signal(signal.SIGTERM)
        streams.check_completed()
        assert server.process.wait(120) == 0, server.said
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", timeout=5)
    with Server("--replicas", "2") as server:
        engines = [pid for pid, line in server.processes.items() if "ServeReplica:aspd:engine" in line]
        assert len(engines) == 2
        os.kill(engines[0], signal.SIGKILL)
        end = time.monotonic() + 120
        codes = []
        while len(codes) < 16 and time.monotonic() < end:
            codes.append(chat(server.url, CONVERSATIONS[len(codes) % 8], max_tokens=1).status_code)
        assert codes.count(200) >= 15, codes


@pytest.mark.slow
def test_a_replica_starts_when_requests_wait() -> None:
    """Check that one replica becomes two under load, that both answer, and that no request fails meanwhile."""
    pytest.importorskip("ray")
    with Server("--replicas", "1:2") as server:
        first = chat(server.url, ask()["messages"], max_tokens=1).headers[REPLICA]
        names, codes, end = {first}, list[int](), time.monotonic() + 300

        def repeat(number: int) -> None:
            messages = [{"role": "user", "content": NUMBERED.format(number)}]
            while len(names) < 2 and time.monotonic() < end:
                answer = chat(server.url, messages, max_tokens=300, ignore_eos=True)
                codes.append(answer.status_code)
                names.add(answer.headers[REPLICA])

        with ThreadPoolExecutor(6) as pool:  # of 8 requests that a replica takes or that may wait; 2 are aimed at
            list(pool.map(repeat, range(6)))
        assert len(names) == 2 and set(codes) == {200}
        assert server.stop() == 0, server.said


def long_engine() -> Engine:
    return Engine(load_model("demo"), max_length=4096, max_batch=2)


@pytest.mark.slow
def test_answers_of_a_replica_that_is_scaled_down_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check streams of two replicas of which one is removed, and the conversations of the removed one."""
    serve = pytest.importorskip("ray.serve")
    options = serve.Deployment.options
    # The same version, so that only the number of replicas changes.
    monkeypatch.setattr(serve.Deployment, "options", lambda self, **more: options(self, **VERSION | more))
    config = ServerConfig(name="demo", max_new_tokens=4000, drain=300.0)
    actors = RayOptions("local", 0, {"CPU": 0.5})
    with cluster(actors), closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        url = f"http://127.0.0.1:{port}"
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            serve.run(make_application(long_engine, config, actors, Replicas(2, 2), batch=2), name=NAME)
            streams = Streams(url, max_tokens=3900, aspd={"mode": "serial"})
            fewer = make_application(long_engine, config, actors, Replicas(1, 1), batch=2)
            scaling = threading.Thread(target=serve.run, args=(fewer,), kwargs={"name": NAME})
            scaling.start()  # ends when the replica has ended
            states: dict[str, int] = {}
            while states != {"RUNNING": 1, "STOPPING": 1} and all(thread.is_alive() for thread in streams.threads):
                states = serve.status().applications[NAME].deployments["engine"].replica_states
            left = {chat(url, messages, max_tokens=1).headers[REPLICA] for messages in CONVERSATIONS}
            assert len(left) == 1 and left < streams.names, "the replica that stops takes no new requests"
            assert all(thread.is_alive() for thread in streams.threads), "both streams go on meanwhile"
            streams.check_completed()
            scaling.join(300)
            assert not scaling.is_alive()
        finally:
            serve.shutdown()


@pytest.mark.slow
def test_settings_of_the_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what Ray Serve receives: bounds of the replicas, requests per replica, waiting requests and draining."""
    serve = pytest.importorskip("ray.serve")
    options, received = serve.Deployment.options, dict[str, dict[str, Any]]()

    def record(deployment: Any, **more: Any) -> Any:
        if "name" in more:  # Ray Serve calls it, too
            received[more["name"]] = more
        return options(deployment, **more)

    monkeypatch.setattr(serve.Deployment, "options", record)
    config = ServerConfig(name="demo", max_waiting=4, drain=7.0)
    actors = RayOptions("local", 0, {"CPU": 2.0, "GPU": 1.0})
    make_application(Engine, config, actors, Replicas(2, 8), batch=16)
    engine, ingress = received["engine"], received["ingress"]
    limits = {"min_replicas": 2, "max_replicas": 8, "target_ongoing_requests": 16}
    assert engine["autoscaling_config"] == limits and "num_replicas" not in engine
    assert engine["max_ongoing_requests"] == 32 and engine["max_queued_requests"] == 4
    assert engine["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 1.0}
    assert engine["graceful_shutdown_timeout_s"] == ingress["graceful_shutdown_timeout_s"] == 7.0
    assert ingress["max_ongoing_requests"] >= 8 * 32 + 4, "the ingress takes what all replicas take"
    make_application(Engine, config, actors, Replicas(3, 3), batch=16)
    assert received["engine"]["num_replicas"] == 3 and "autoscaling_config" not in received["engine"]


@pytest.mark.slow
def test_wrong_options(capsys: Any) -> None:
    pytest.importorskip("ray")
    for more, message in (
        (["--replicas", "0"], "--replicas: expected MIN from 1 to MAX"),
        (["--adapter-folder", "."], "--ray: expected --adapters"),
        (["--model", "none"], "none"),
        (["--coordinator", "x:1", "--processes", "2", "--process", "0"], "--ray: expected replicas of one process"),
    ):
        assert aspd.main(["serve", "--model", "demo", "--ray", "local", *more]) == 2
        assert message in capsys.readouterr().err
