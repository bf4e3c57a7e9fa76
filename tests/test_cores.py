"""XLA's threads on a core each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import infer.server.serve
from infer import Engine
from infer.server.config import ServerConfig

SCRIPT = """
import json, os, sys
import jax
from infer.server.cores import COMPUTES, TASKS, pin_threads

jax.block_until_ready(jax.numpy.ones(3))
if "other" in sys.argv:
    jax.default_backend = lambda: "gpu"
if "forbidden" in sys.argv:
    def refuse(*_): raise PermissionError(1, "Operation not permitted")
    os.sched_setaffinity = refuse
if "forbidden-midway" in sys.argv:
    every, bind, first = os.sched_getaffinity(0), os.sched_setaffinity, []
    def refuse_others(thread, cores):
        if cores != every and first and first[0] != thread: raise PermissionError(1, "Operation not permitted")
        first.append(thread)
        bind(thread, cores)
    os.sched_setaffinity = refuse_others
bound = pin_threads()
of = {int(t.name): (t / "comm").read_text().strip() for t in TASKS.iterdir()}
cores = {thread: sorted(os.sched_getaffinity(thread)) for thread in of}
mine = [cores[thread] for thread, name in of.items() if name == COMPUTES]
others = [cores[thread] for thread, name in of.items() if name != COMPUTES]
print(json.dumps({"bound": bound, "mine": mine, "others": others, "again": pin_threads()}))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose cores")


def pinned(*arguments: str, **environment: str) -> dict[str, Any]:
    """What becomes of the threads of a new process."""
    own = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(
        command, env=own | {"JAX_PLATFORMS": "cpu"} | environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_of_xlas_threads_has_a_core_of_its_own_and_the_others_have_all() -> None:
    every = sorted(os.sched_getaffinity(0))
    found = pinned()
    assert found["bound"] == len(every) == found["again"]
    assert sorted(found["mine"]) == [[core] for core in every]
    assert found["others"] and all(cores == every for cores in found["others"])


def test_only_the_cores_that_a_process_may_use_are_given_out() -> None:
    every = os.sched_getaffinity(0)
    one = max(every)
    try:
        os.sched_setaffinity(0, {one})  # a child has what its parent has
        found = pinned()
    finally:
        os.sched_setaffinity(0, every)
    assert found["bound"] == 1 and found["mine"] == [[one]]


def test_threads_stay_free_where_they_do_not_fit_or_may_not_be_bound() -> None:
    every = sorted(os.sched_getaffinity(0))
    more = pinned(NPROC=str(len(every) + 1))
    assert more["bound"] == 0 and more["mine"] == [every] * (len(every) + 1)
    for reason in ("other", "forbidden", "forbidden-midway")[: 3 if len(every) > 1 else 2]:
        found = pinned(reason)
        assert found["bound"] == 0 and found["mine"] == [every] * len(every)


@pytest.mark.parametrize(("pin", "processes", "bound"), [(True, 1, 1), (False, 1, 0), (True, 2, 0)])
def test_a_server_binds_threads_unless_told_otherwise(
    engine: Engine, monkeypatch: Any, pin: bool, processes: int, bound: int
) -> None:
    """Of several processes on one machine, each would bind its threads to the same cores."""
    calls: list[str] = []
    monkeypatch.setattr(infer.server.serve, "pin_threads", lambda: calls.append("pin"))
    monkeypatch.setattr(infer.server.serve.jax, "process_count", lambda: processes)
    monkeypatch.setattr(infer.server.serve.signal, "signal", lambda *_: None)
    monkeypatch.setattr(infer.server.serve.uvicorn.Server, "run", lambda *_, sockets: sockets[0].close())
    infer.server.serve.serve(engine, ServerConfig(port=0, pin_threads=pin))
    assert len(calls) == bound
