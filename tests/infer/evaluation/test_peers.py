"""The benchmark of servers: what it asks for, beside the engine's own answers, and servers that refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax.errors import ConfigError, DataError
from infer import Engine, SamplingParams
from infer.evaluation.extraction import MODES, read_tasks
from infer.evaluation.peers import Server, peer_table, tasks_with, time_fields, time_server
from infer.server.config import ServerConfig
from tests.helpers.serving import Running

pytestmark = pytest.mark.further


def test_values_are_those_of_the_engine(demo_engine: Engine) -> None:
    tasks = tasks_with(read_tasks(None), 4, 2)
    assert len({task.id for task in tasks}) == 2 and all(len(task.gold) == 4 for task in tasks)
    right, tokens = 0, []
    for task in tasks:
        params = SamplingParams(max_new_tokens=400, json_schema=task.schema)
        (result,) = demo_engine.generate([[{"role": "user", "content": task.prompt}]], params, "serial")
        right += sum(task.right(json.loads(result.text)).values()) if result.finish_reason == "stop" else 0
        tokens.append(result.stats.content_tokens)
    with Running(demo_engine, ServerConfig()) as running:
        server = Server.connect(f"own={running.url}/v1", 60)
        assert server.ours
        (time,) = time_fields(server, "serial", tasks)
        assert (time.kind, time.right, time.fields, time.tokens) == ("4 fields", right, 8, tokens)
        (other,) = time_fields(replace(server, ours=False), "", tasks)
        assert other.tokens == tokens, "exact fields, the default of a server, are the serial answer"


def test_ways(demo_engine: Engine, tmp_path: Path, capsys: Any) -> None:
    """Check that a server of this project is asked in all ways, others in one, and that a refusal ends nothing."""
    with Running(demo_engine, ServerConfig()) as running:
        named, file = f"own={running.url}/v1", tmp_path / "times.json"
        small = ["--tokens", "8", "--fields", "4", "--limit", "1", "--decisions", "2", "--repeats", "1"]
        assert aspd.main(["bench", "peers", named, *small, "--json", str(file)]) == 0
        times = json.loads(file.read_text())
        ways = [("text", "serial"), *(("4 fields", mode) for mode in MODES)]
        ways += [("2 decisions", "a request for each"), ("2 decisions", "one request")]
        assert [(one["kind"], one["way"]) for one in times] == ways
        assert all(second > 0 for one in times for second in one["seconds"])
        assert capsys.readouterr().out.count("| own |") == 6
        server = replace(Server.connect(named, 60), model="unknown", ours=False)
        left_out: list[str] = []
        assert time_server(server, 8, [tasks_with(read_tasks(None), 4, 1)], [2], 1, left_out) == []
        assert [line.partition(":")[0] for line in left_out] == ["own, text", "own, fields", "own, decisions"]
        assert "unknown" in left_out[0]
    assert peer_table([]).count("\n") == 1


@pytest.mark.parametrize("named", ["http://127.0.0.1:1/v1", "name=127.0.0.1", "name=http://127.0.0.1:1/v1"])
def test_unreachable_servers_are_named(named: str) -> None:
    with pytest.raises(ConfigError, match=r"server( name)?: "):
        Server.connect(named, 5)


def test_numbers_of_fields_that_no_task_has() -> None:
    with pytest.raises(DataError, match="expected a number of fields that a task has, got 5000"):
        tasks_with(read_tasks(None), 5000, 3)
