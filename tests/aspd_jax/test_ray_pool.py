"""Tasks by workers: capacities, deaths of actors, errors and messages, on a local cluster."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import aspd
import aspd_jax.ray_pool
from aspd_jax.errors import RequestError
from aspd_jax.ray_pool import RayOptions, cluster, require_ray, run_here, run_on_ray
from tests.helpers.ray_workers import Squares, made, make_squares

TASKS = [(f"k{number}", number) for number in range(20)]
SQUARES = {f"k{number}": number * number for number in range(20)}
LOCAL = RayOptions("local", 2, {"CPU": 1.0})


def test_one_worker_in_this_process() -> None:
    worker = Squares(seconds=0)
    most: list[int] = []
    advance = worker.advance

    def noted(new: Any) -> Any:
        most.append(len(new) + len(worker.held))
        return advance(new)

    worker.advance = noted  # type: ignore[method-assign]
    found = list(run_here(worker, TASKS))
    assert dict(found) == SQUARES and len(found) == 20 and max(most) == worker.capacity
    assert list(run_here(Squares(), [])) == []


def test_resources() -> None:
    assert RayOptions.parse_resources("CPU=1.5,GPU=1,TPU=4") == {"CPU": 1.5, "GPU": 1.0, "TPU": 4.0}
    options = RayOptions("local", 1, {"GPU": 1.0, "TPU": 4.0})
    assert options.actor_options() == {"num_cpus": 0, "num_gpus": 1.0, "resources": {"TPU": 4.0}}
    for text in ("", "CPU", "CPU=x", "=1", "CPU=-1", "CPU=nan", "CPU=inf"):
        with pytest.raises(RequestError, match="--ray-resources: expected names and numbers"):
            RayOptions.parse_resources(text)


def test_a_message_says_how_to_install_ray(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(aspd_jax.ray_pool, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"expected the package ray, got none. Run: pip install 'aspd-jax\[ray\]'"):
        require_ray()
    command = ["generate", "--model", "demo", "--input", "none.jsonl", "--output", str(tmp_path / "out.jsonl")]
    assert aspd.main([*command, "--ray", "local"]) == 2
    assert "aspd: --ray: expected the package ray, got none" in capsys.readouterr().err
    assert aspd.main([*command, "--ray-workers", "2"]) == 2
    assert "--ray-workers: expected --ray, got none" in capsys.readouterr().err


@pytest.mark.slow
def test_actors(tmp_path: Path) -> None:
    """Check that every task ends once, and that only tasks of dead actors are repeated."""
    pytest.importorskip("ray")
    with cluster(LOCAL) as workers:
        assert workers == 2
        log = tmp_path / "calm"
        found = list(run_on_ray(partial(make_squares, log), TASKS, LOCAL, workers))
        assert dict(found) == SQUARES and len(found) == 20
        assert Counter(made(log)) == Counter(repr(key) for key in SQUARES)
        assert len({line.split()[0] for line in log.read_text().splitlines()}) == 2, "both actors take part"

        log = tmp_path / "killed"
        make = partial(make_squares, log, fatal=7, mark=tmp_path / "mark")
        order: list[str] = []
        for key, square in run_on_ray(make, TASKS, LOCAL, workers):
            assert square == SQUARES[key] and key not in order
            order.append(key)
        assert sorted(order) == sorted(SQUARES) and (tmp_path / "mark").exists()
        again = {key for key, times in Counter(made(log)).items() if times > 1}
        assert repr("k7") in again and len(again) <= Squares.capacity and len(made(log)) == 20 + len(again)

        log = tmp_path / "fatal"
        results = run_on_ray(partial(make_squares, log, fatal=5), TASKS, LOCAL, workers)
        order = [key for key, _ in islice(results, 19)]
        with pytest.raises(RequestError, match=r"got 3 deaths with record k5 .* run the same command to resume"):
            next(results)
        assert sorted(order) == sorted(set(SQUARES) - {"k5"}), "a fatal task keeps no other from its end"

        with pytest.raises(RequestError, match=r"^4: expected another number, got 4\.$"):
            list(run_on_ray(partial(make_squares, tmp_path / "refused", refused=4), TASKS, LOCAL, workers))
        assert list(run_on_ray(partial(make_squares, log), [], LOCAL, workers)) == []
    with (
        pytest.raises(RequestError, match="expected at most the resources of the cluster, got GPU=64"),
        cluster(RayOptions("local", 0, {"GPU": 64.0})),
    ):
        pass
    with (
        pytest.raises(RequestError, match=r"^--ray: expected the address of a cluster, got 127\.0\.0\.1:1: "),
        cluster(RayOptions("127.0.0.1:1")),
    ):
        pass
