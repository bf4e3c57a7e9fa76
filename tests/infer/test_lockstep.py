"""One model over several processes: they do the same, in the same order, and answers are those of one process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax import LanguageModel, load_model
from infer import Engine, SamplingParams
from infer.lockstep import Lockstep, StepCommand
from infer.request import Request, ScoredBranch
from tests.conftest import ROOT
from tests.helpers.serving import SERVE, wait_for
from tests.helpers.tasks import held_out

QUESTIONS = sorted(
    (item for item in held_out(6) if item.forks), key=lambda item: len(item.answer)
)  # the shortest first

numbers = st.integers(0, (1 << 31) - 1)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    top_k=numbers,
    top_p=st.floats(0.01, 1),
    seed=st.none() | numbers,
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
)
some = st.lists(numbers, max_size=3).map(tuple)
requests = st.builds(
    Request,
    prompt=st.lists(numbers, min_size=1, max_size=40).map(tuple),
    adapter=numbers,
    params=params,
    mode=st.sampled_from(["adaptive", "serial"]),
    budget=numbers,
    seed=numbers,
    stream=st.sampled_from(["text", "branches", None]),
    max_steps=st.none() | numbers,
    alternatives=st.none() | numbers,
    echo=st.booleans(),
    scored=st.lists(st.builds(ScoredBranch, some, some, some), max_size=3).map(tuple),
)
turns = st.builds(
    StepCommand,
    submitted=st.lists(st.tuples(numbers, requests), max_size=3).map(tuple),
    adapter=st.tuples(st.text(max_size=3), st.text(max_size=3)),
    cancelled=some,
    steps=numbers,
    last=st.booleans(),
)


@settings(max_examples=60)
@given(turns)
def test_turns_arrive_as_they_were(turn: StepCommand) -> None:
    assert StepCommand.from_bytes(turn.to_bytes()) == turn


@pytest.mark.further
def test_what_follows_is_in_the_same_state() -> None:
    """Two engines that do the same turns, through bytes, have the same answers and logits after each."""
    lm = load_model("demo")
    both = [Lockstep(Engine(lm, max_length=1024, max_batch=1)) for _ in range(2)]
    engine = both[0].engine
    prompts = [[{"role": "user", "content": item.question}] for item in QUESTIONS[:3]]
    checked = [
        engine.check(prompt, SamplingParams(temperature=0.5, seed=number, logit_bias={7: 0.5}, max_new_tokens=60))
        for number, prompt in enumerate(prompts)
    ]
    details: list[dict[str, Any]] = [{"stream": "text"}, {"alternatives": 2}, {}]
    requests = [(n, replace(checked[n], **details[n])) for n in range(3)]
    plan = [
        StepCommand(tuple(requests[:2]), steps=9),
        StepCommand((requests[2],), steps=7),
        StepCommand(cancelled=(0,), steps=5),
    ]
    for turn in plan + [StepCommand(steps=40)] * 4:
        both[0].do(turn)
        both[1].do(StepCommand.from_bytes(turn.to_bytes()))
        ids = [[of.handles[n].partial().token_ids for n in of.handles] for of in both]
        assert ids[0] == ids[1] and any(ids[0])
    assert both[0].handles[0].cancelled and all(handle.result for handle in both[0].handles.values())
    assert both[0].logprobs == both[1].logprobs and both[0].logprobs[1]


def test_a_change_of_adapters_that_fails_is_refused(bare_lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check errors of any kind in the change, and before it."""
    engine = Engine(bare_lm, max_length=64, max_batch=1)
    alone, change = Lockstep(engine), StepCommand(adapter=("name", "folder"))
    for place, name in ((engine.adapters, "put"), (engine, "submit_checked")):
        command = replace(change, submitted=((0, engine.check([1])),)) if place is engine else change
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *_: (_ for _ in ()).throw(MemoryError("full")))
            with pytest.raises(MemoryError):
                alone.do(command)
        assert alone.refused
        alone.do(StepCommand())
        assert not alone.refused


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


@pytest.mark.further
def test_two_processes_serve_together(tmp_path: Path) -> None:
    """Tensor-parallel, with decisions that depend on clocks: draft tokens have to pay. Clients come and go."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    arguments = [
        *(*SERVE, "--batch", "1", "--max-length", "256"),
        *("--drafts", "lookup", "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"),
    ]
    logs = [(tmp_path / f"{number}.log").open("w") for number in range(2)]
    processes = [
        subprocess.Popen(
            [*arguments, str(number)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=logs[number], text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        stdout = processes[0].stdout
        assert stdout is not None
        url = next(found[0] for line in stdout if (found := re.search(r"http://\S+:\d+", line)))
        assert wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        texts: dict[int, Any] = {}

        def ask(number: int, **more: Any) -> Any:
            message: Any = {"role": "user", "content": QUESTIONS[number].question}
            return client.chat.completions.create(model="demo", messages=[message], temperature=0, **more)

        def whole(number: int) -> None:
            texts[number] = ask(number).choices[0].message.content

        threads = [threading.Thread(target=whole, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        stream = ask(0, stream=True, extra_body={"aspd": {"mode": "serial"}})
        next(iter(stream))
        stream.close()
        for thread in threads:
            thread.join(300)
        likely = ask(0, logprobs=True, max_tokens=5, extra_body={"aspd": {"mode": "serial"}}).choices[0]
        processes[1].send_signal(signal.SIGTERM)  # as a cluster sends it to all at once; the first one decides
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(1, stream=True))
        processes[0].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in processes] == [0, 0]
    except BaseException:
        print(*((tmp_path / f"{number}.log").read_text()[-3000:] for number in range(2)), sep="\n---\n")
        raise
    finally:
        for process in processes:
            process.kill()
    assert texts == {number: QUESTIONS[number].answer for number in range(2)}
    assert streamed == texts[1] and len(likely.logprobs.content) == 5
