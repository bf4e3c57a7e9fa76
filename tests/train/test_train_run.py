"""Whole training runs: resumed, killed, on meshes, in two processes."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax.traverse_util import flatten_dict
from safetensors import safe_open

import aspd
from aspd_jax import load_model
from aspd_jax.errors import CheckpointError, ConfigError, DataError
from tests.conftest import ROOT
from tests.helpers.training import SHAPE, changed, first_batch, losses, prepared, small, wide, written
from train import batches
from train.checkpoints import Checkpoints
from train.config import TrainConfig
from train.loop import export
from train.loop import train as run_training
from train.step import TrainState


def interrupt(config: TrainConfig, run: Path, step: int, monkeypatch: Any) -> None:
    """Train until the data of a step is asked for, in a new run."""
    draw, steps = batches._as_batch, itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(steps) == step:
            raise KeyboardInterrupt
        return draw(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "_as_batch", failing)
        with pytest.raises(KeyboardInterrupt):
            run_training(config, run, progress=False)


def equal_rows(trained: Any, stored: Any) -> None:
    """Compare an array with a stored one, which has no padded rows of the vocabulary."""
    np.testing.assert_array_equal(trained[: len(stored)], stored)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch: Any) -> None:
    config = changed(small(), log_every=1)
    whole = run_training(config, tmp_path / "whole", progress=False)

    interrupt(config, tmp_path / "cut", 3, monkeypatch)
    draw, drawn = batches._as_batch, []
    monkeypatch.setattr(batches, "_as_batch", lambda *arguments: drawn.append(1) or draw(*arguments))
    resumed = run_training(config, tmp_path / "cut", progress=False)
    assert len(drawn) == 2, "goes on from the checkpoint of step 2"
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    loaded = load_model(tmp_path / "cut" / "model")
    jax.tree.map(equal_rows, whole.params, loaded.params)
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut") and len(losses(tmp_path / "whole")) == 4
    with pytest.raises(ConfigError, match=r"got other values of data\.rows, seed"):
        run_training(changed(config, seed=1, data__rows=3), tmp_path / "cut")
    export(tmp_path / "cut", tmp_path / "exported", step=2)
    earlier = load_model(tmp_path / "exported")
    assert np.abs(np.asarray(earlier.params["norm"]["scale"]) - whole.params["norm"]["scale"]).max() > 0
    export(tmp_path / "cut", tmp_path / "rounded", dtype="bfloat16")
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(np.float32), whole.params)
    jax.tree.map(equal_rows, rounded, load_model(tmp_path / "rounded").params)
    with safe_open(tmp_path / "rounded" / "model.safetensors", framework="numpy") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(CheckpointError, match="expected a checkpoint of step 2, 4, got 3"):
        export(tmp_path / "cut", tmp_path / "none", step=3)
    with pytest.raises(CheckpointError, match="expected a training run"):
        export(tmp_path, tmp_path / "none")


def test_a_run_whose_files_have_changed_is_not_resumed(tmp_path: Path, capsys: Any) -> None:
    config, run = written(changed(SHAPE, steps=1), tmp_path), tmp_path / "run"
    (records,), weights = map(Path, config.data.train), tmp_path / "base" / "model.safetensors"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    command = ["train", str(tmp_path / "config.yaml"), "--output", str(run)]
    assert aspd.main(command) == 0 and capsys.readouterr().out.endswith(f"model written to {run / 'model'}\n")
    assert aspd.main(command) == 0, "negative control: the same files"
    assert "written" not in (out := capsys.readouterr().out) and out.endswith(
        "model exists already: the run is complete\n"
    )
    for file, key, data in (
        (records, "data.train", records.read_bytes().replace(b"cost", b"price")),
        (weights, "model.checkpoint", weights.read_bytes()[:-1] + b"\1"),
    ):
        before = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"got other contents of {key}\. Choose another folder"):
            run_training(config, run, progress=False)
        file.write_bytes(before)
    for name in ("config.json", "inputs.json"):
        (run / name).write_text("{")
        with pytest.raises(CheckpointError, match=rf"{name}: expected a JSON object"):
            run_training(config, run, progress=False)
        shutil.rmtree(run / "checkpoints")
        shutil.rmtree(run / "model")
        run_training(config, run, progress=False)  # a run without a checkpoint and a result begins again


def test_a_failed_attempt_does_not_hold_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        run_training(changed(small(), data__train=("none.jsonl",)), tmp_path, progress=False)
    config = changed(small(), steps=1)
    run_training(config, tmp_path, progress=False)
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 1
    with pytest.raises(ConfigError, match="got other values of steps"):  # negative control
        run_training(changed(config, steps=2), tmp_path, progress=False)


@pytest.mark.further
@pytest.mark.several
def test_a_run_goes_on_with_other_devices_and_memory(tmp_path: Path, monkeypatch: Any) -> None:
    config = changed(small(), log_every=1, optimiser__accumulate=2)
    run_training(config, tmp_path / "whole", progress=False)
    interrupt(config, tmp_path / "moved", 2, monkeypatch)
    moved = changed(
        config, optimiser__accumulate=1, mesh__fsdp=2, model__remat=True, data__cache=str(tmp_path / "cache")
    )
    run_training(moved, tmp_path / "moved", progress=False)
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "whole"), rtol=1e-5)


def test_restoring_holds_no_initial_state_and_exporting_no_optimiser(tmp_path: Path, monkeypatch: Any) -> None:
    """Count the bytes on devices before and after a state is restored, as multiples of the parameters."""
    config, counts = changed(small(), steps=3), []
    interrupt(config, tmp_path / "run", 2, monkeypatch)
    restore = Checkpoints.restore

    def counting(checkpoints: Checkpoints, step: int, like: TrainState) -> Any:
        gc.collect()
        before = sum(leaf.nbytes for leaf in jax.live_arrays())
        result = restore(checkpoints, step, like)
        parameters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like.params))
        counts.append([(size - others) / parameters for size in (before, sum(a.nbytes for a in jax.live_arrays()))])
        return result

    monkeypatch.setattr(Checkpoints, "restore", counting)
    gc.collect()
    others = sum(leaf.nbytes for leaf in jax.live_arrays())
    run_training(config, tmp_path / "run", progress=False)
    export(tmp_path / "run", tmp_path / "exported")
    assert np.round(counts, 2).tolist() == [[0, 3], [0, 1]], "parameters and two moments; parameters"


def test_the_rate_of_tokens_excludes_saving(tmp_path: Path, monkeypatch: Any) -> None:
    save, seconds = Checkpoints.save, 3.0

    def slowly(checkpoints: Checkpoints, step: int, *values: Any) -> None:
        time.sleep(seconds if step == 2 else 0)
        save(checkpoints, step, *values)

    monkeypatch.setattr(Checkpoints, "save", slowly)
    config = changed(small(), log_every=1, save_every=2, steps=3)
    run_training(config, tmp_path, progress=False)
    rates = [json.loads(line)["tokens_per_second"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rates[2] > config.data.rows * config.data.length / seconds


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    state = TrainState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), {"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with Checkpoints(tmp_path / "both", keep=1, best=True) as checkpoints:
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), 1):
            checkpoints.save(step, state, {"step": step}, loss)
    with Checkpoints(tmp_path / "both", read_only=True) as checkpoints:
        assert checkpoints.steps == [2, 4]
    with Checkpoints(tmp_path / "last", keep=2) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, state, {"step": step})
    with Checkpoints(tmp_path / "last", read_only=True) as checkpoints:
        assert checkpoints.steps == [3, 4]


def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    """Check that a run killed at random moments has the losses and the model of an uninterrupted run."""
    config = changed(small(), steps=12, save_every=1, keep=2, log_every=1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    run_training(config, tmp_path / "whole", progress=False)
    cut = tmp_path / "cut"
    command = ["train", str(tmp_path / "config.yaml"), "--output", str(cut)]
    killed, chance = 0, random.Random(0)
    for _ in range(2):  # the second one may end before it is killed
        reached = losses(cut)[-1:] if (cut / "metrics.jsonl").exists() else []
        process = subprocess.Popen(
            [sys.executable, "-m", "aspd", *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Wait until it moves, then a little.
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if (cut / "metrics.jsonl").exists() and losses_if_whole(cut)[-1:] not in (reached, []):
                break
        time.sleep(chance.uniform(0.0, 0.6))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        assert process.wait() in (0, -signal.SIGKILL)
    assert killed and aspd.main(command) == 0
    assert losses(cut) == losses(tmp_path / "whole")
    one, other = (load_model(tmp_path / name / "model").params for name in ("whole", "cut"))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def losses_if_whole(run: Path) -> list[float]:
    try:
        return losses(run)
    except (json.JSONDecodeError, AssertionError):
        return []


MESHES: list[Any] = [{"data": 2, "fsdp": 2, "tensor": 2}]

MESHES += [
    pytest.param(shape, marks=pytest.mark.slow) for shape in ({"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2})
]

REFERENCE: dict[str, Any] = {}


@pytest.mark.further
@pytest.mark.several
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_mesh_gives_the_same_losses(shape: dict[str, int], tmp_path: Path) -> None:
    if "one" not in REFERENCE:
        run_training(changed(wide(), save_every=2), tmp_path / "one", progress=False)
        REFERENCE["one"] = losses(tmp_path / "one")
    config = changed(wide(), save_every=2, **{f"mesh__{axis}": size for axis, size in shape.items()})
    run_training(config, tmp_path / "many", progress=False)
    np.testing.assert_allclose(losses(tmp_path / "many"), REFERENCE["one"], rtol=1e-5)
    setup = prepared(config)
    for tree in (setup.state.params, setup.state.optimiser[1][0].mu):
        flat = flatten_dict(tree)
        gate = flat[("layer_0", "feed_forward", "gate_up", "kernel")].sharding.shard_shape((2, 32, 64))
        assert gate == (2, 32 // shape.get("tensor", 1), 64 // shape.get("fsdp", 1))
        query = flat[("layer_1", "attention", "query_key_value", "kernel")].sharding.shard_shape((2, 4, 16, 64))
        assert query == (2 // shape.get("tensor", 1), 4, 16, 64 // shape.get("fsdp", 1))
        head = flat[("head", "kernel")].sharding.shard_shape((768, 64))
        assert head == (768 // shape.get("tensor", 1), 64 // shape.get("fsdp", 1))
    batch = setup.place(first_batch(config, setup.lm))
    assert batch.tokens.sharding.shard_shape((8, 128)) == (8 // (shape.get("data", 1) * shape.get("fsdp", 1)), 128)


@pytest.mark.several
@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path: Path, monkeypatch: Any) -> None:
    config = changed(wide(), save_every=2)
    run_training(config, tmp_path / "whole", progress=False)

    interrupt(changed(config, mesh__fsdp=8), tmp_path / "moved", 2, monkeypatch)
    run_training(changed(config, mesh__data=2, mesh__tensor=2), tmp_path / "moved", progress=False)
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "whole"), rtol=1e-5)


def test_several_processes_need_a_mesh_of_all_devices(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"expected the {jax.device_count()} devices of all processes, got 1. Set"):
        run_training(small(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.further
def test_a_process_without_a_cluster_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(small())))))
    command = [sys.executable, "-m", "aspd", "train", str(tmp_path / "config.yaml"), "--distributed"]
    done = subprocess.run([*command, "--output", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--distributed: expected a process of SLURM, GKE or Cloud TPU, got: " in done.stderr


@pytest.mark.further
def test_two_processes_train_together(tmp_path: Path) -> None:
    config = changed(wide(), steps=2, save_every=2, mesh__data=2, mesh__fsdp=2)
    run_training(changed(config, mesh__data=1, mesh__fsdp=1), tmp_path / "one", progress=False)
    config = changed(config, model__scan=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    port = 20000 + os.getpid() % 20000
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "aspd", "train", str(tmp_path / "config.yaml")),
                *("--output", str(tmp_path / "two"), "--coordinator", f"127.0.0.1:{port}"),
                *("--processes", "2", "--process", str(number)),
            ],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for number in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=400)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
    one, two = (flatten_dict(load_model(tmp_path / name / "model").params) for name in ("one", "two"))
    for path, leaf in one.items():
        np.testing.assert_allclose(leaf, two[path], atol=2e-5)
