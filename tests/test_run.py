"""Whole training runs: resumed, killed, on meshes, in parts, with adapters."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax.traverse_util import flatten_dict

import train.batches
import train.loop
from aspd_jax import LanguageModel, Layout, build_layout, load_model
from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.language_model import save_model
from aspd_jax.model.attention import Attention, chunked, dense
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.sharding import make_mesh
from aspd_jax.structure import to_json
from tests.conftest import ROOT
from tests.test_train import SMALL, changed
from train.batches import synthetic_batch
from train.checkpoints import Checkpoints
from train.config import TrainConfig
from train.loop import export
from train.loop import train as run_training
from train.setup import Setup, initial_model, load, set_up
from train.step import TrainState, rounded, train_step
from train.tasks import problem

WIDE = changed(
    SMALL, model__layers=2, model__embed=64, model__heads=4, model__kv_heads=2, data__rows=8, data__short_rows=8,
    data__short_length=128, steps=4, log_every=1,
)  # fmt: skip


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))
    return [line["loss"] for line in lines if "loss" in line]


def prepared(config: TrainConfig) -> Setup:
    mesh = make_mesh(vars(config.mesh))
    return set_up(config, load(config, mesh), mesh, config.steps)


def interrupt(config: TrainConfig, run: Path, step: int, monkeypatch: Any) -> None:
    """Train until the data of a step is asked for."""

    def failing(*args: Any) -> Any:
        if args[-1] == step:
            raise KeyboardInterrupt
        return synthetic_batch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train.batches, "synthetic_batch", failing)
        with pytest.raises(KeyboardInterrupt):
            run_training(config, run, progress=False)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch: Any) -> None:
    small = changed(SMALL, log_every=1)
    whole = run_training(small, tmp_path / "whole", progress=False)

    interrupt(small, tmp_path / "cut", 3, monkeypatch)
    seen = []
    monkeypatch.setattr(train.batches, "synthetic_batch", lambda *args: seen.append(args[-1]) or synthetic_batch(*args))
    resumed = run_training(small, tmp_path / "cut", progress=False)
    assert seen == [2, 3], "goes on from the checkpoint of step 2"
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    loaded = load_model(tmp_path / "cut" / "model")
    jax.tree.map(np.testing.assert_array_equal, whole.params, loaded.params)
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut") and len(losses(tmp_path / "whole")) == 4
    with pytest.raises(ConfigError, match=r"holds a run with another data\.rows, seed"):
        run_training(changed(small, seed=1, data__rows=3), tmp_path / "cut")
    export(tmp_path / "cut", tmp_path / "exported", step=2)
    earlier = load_model(tmp_path / "exported")
    assert np.abs(np.asarray(earlier.params["norm"]["scale"]) - whole.params["norm"]["scale"]).max() > 0
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are: 2, 4"):
        export(tmp_path / "cut", tmp_path / "none", step=3)
    with pytest.raises(CheckpointError, match="holds no training run"):
        export(tmp_path, tmp_path / "none")


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
    """A run killed again and again, at random, saves included, leaves the losses and the model of one that was not."""
    config = changed(SMALL, steps=12, save_every=1, keep=2, log_every=1, data__short_steps=0)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config.as_dict()))))
    run_training(config, tmp_path / "whole", progress=False)
    command = [sys.executable, "-m", "aspd", "train", str(tmp_path / "config.yaml"), "--output"]
    killed, chance = 0, random.Random(0)
    cut = tmp_path / "cut"
    while True:
        reached = losses(cut)[-1:] if (cut / "metrics.jsonl").exists() else []
        process = subprocess.Popen([*command, str(cut)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if killed < 2:
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
            process.wait()
            continue
        assert process.wait(timeout=300) == 0, process.stderr.read().decode() if process.stderr else ""
        break
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


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_mesh_gives_the_same_losses(shape: dict[str, int], tmp_path: Path) -> None:
    if "one" not in REFERENCE:
        run_training(changed(WIDE, save_every=2), tmp_path / "one", progress=False)
        REFERENCE["one"] = losses(tmp_path / "one")
    config = changed(WIDE, save_every=2, **{f"mesh__{axis}": size for axis, size in shape.items()})
    run_training(config, tmp_path / "many", progress=False)
    np.testing.assert_allclose(losses(tmp_path / "many"), REFERENCE["one"], rtol=1e-5)
    setup = prepared(config)
    for tree in (setup.state.params, setup.state.optimiser[1][0].mu):
        flat = flatten_dict(tree)
        gate = flat[("layer_0", "feed_forward", "gate", "kernel")].sharding.shard_shape((64, 32))
        assert gate == (64 // shape.get("fsdp", 1), 32 // shape.get("tensor", 1))
        query = flat[("layer_1", "attention", "query", "kernel")].sharding.shard_shape((64, 4, 16))
        assert query == (64 // shape.get("fsdp", 1), 4 // shape.get("tensor", 1), 16)
        head = flat[("head", "kernel")].sharding.shard_shape((64, 768))
        assert head == (64 // shape.get("fsdp", 1), 768 // shape.get("tensor", 1))
    batch = setup.place(synthetic_batch(setup.lm.codec, setup.lm.tokenizer, config, 0))
    assert batch.tokens.sharding.shard_shape((8, 128)) == (8 // (shape.get("data", 1) * shape.get("fsdp", 1)), 128)


REFERENCE: dict[str, Any] = {}


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path: Path, monkeypatch: Any) -> None:
    config = changed(WIDE, save_every=2)
    run_training(config, tmp_path / "whole", progress=False)

    interrupt(changed(config, mesh__fsdp=8), tmp_path / "moved", 2, monkeypatch)
    run_training(changed(config, mesh__data=2, mesh__tensor=2), tmp_path / "moved", progress=False)
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "whole"), rtol=1e-5)


def test_two_processes_train_together(tmp_path: Path) -> None:
    config = changed(WIDE, steps=2, save_every=2, mesh__data=2, mesh__fsdp=2)
    run_training(changed(config, mesh__data=1, mesh__fsdp=1), tmp_path / "one", progress=False)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config.as_dict()))))
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


def stepped(config: TrainConfig) -> tuple[Any, Any]:
    """Metrics and full parameters after one step."""
    setup = prepared(config)
    batch = synthetic_batch(setup.lm.codec, setup.lm.tokenizer, config, 5)
    state, metrics = train_step(
        setup.state, setup.frozen, setup.place(batch), setup.model, setup.optimiser, config.optimiser.accumulate
    )
    return metrics, setup.language_model(state).params


WAYS: list[Any] = [
    {"optimiser__accumulate": 4},
    {"model__scan": True, "model__remat": True, "optimiser__accumulate": 2, "mesh__fsdp": 4},
]
WAYS += [pytest.param(change, marks=pytest.mark.slow) for change in ({"model__scan": True}, {"model__remat": True})]


@pytest.mark.parametrize("change", WAYS, ids=str)
def test_the_same_step_in_another_way(change: dict[str, Any]) -> None:
    """Accumulated, scanned and rematerialised steps are the plain step; rows differ in how many tokens they learn."""
    base = changed(WIDE, optimiser__warmup=0.0, steps=1)
    metrics, params = stepped(base)
    other, after = stepped(changed(base, **change))
    assert float(other["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert float(other["gradient_norm"]) == pytest.approx(float(metrics["gradient_norm"]), rel=1e-4)
    assert jax.tree.structure(params) == jax.tree.structure(after)


def test_gradients_of_an_accumulated_step_are_those_of_the_whole(monkeypatch: Any) -> None:
    """Compared through plain gradient descent, in which an update is the gradient."""
    monkeypatch.setattr("train.setup.make_optimiser", lambda config, steps: SGD)
    SGD = optax.sgd(1.0)
    whole, parts = (stepped(changed(WIDE, optimiser__accumulate=parts))[1] for parts in (1, 4))
    start = prepared(WIDE).language_model(prepared(WIDE).state).params
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(start), strict=True)]
    assert max(moved) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, parts)


def test_a_step_that_is_not_finite_is_skipped_and_counted() -> None:
    setup = prepared(SMALL)
    batch = synthetic_batch(setup.lm.codec, setup.lm.tokenizer, SMALL, 0)
    before = jax.device_get(setup.state)
    bad = batch._replace(loss=np.where(batch.loss > 0, np.inf, 0).astype(np.float32))
    state, metrics = train_step(setup.state, setup.frozen, setup.place(bad), setup.model, setup.optimiser)
    assert int(metrics["skipped"]) == 1 and int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, before.optimiser, state.optimiser)
    for _ in range(2):  # the first one has a learning rate of 0
        state, metrics = train_step(state, setup.frozen, setup.place(batch), setup.model, setup.optimiser)
    assert int(metrics["skipped"]) == 1 and np.isfinite(float(metrics["loss"]))
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before.params, state.params)), strict=True)]
    assert max(moved) > 0


def test_bfloat16_parameters_move_on_average() -> None:
    """Updates far below the spacing of bfloat16 add up, as they would not with rounding to the nearest."""
    old = {"a": jnp.ones((64, 64), jnp.bfloat16)}
    new = {"a": jnp.full((64, 64), 1.0 + 2.0**-11)}
    moved = rounded(new, old, jax.random.key(0))["a"]
    assert moved.dtype == jnp.bfloat16 and set(np.unique(np.asarray(moved, np.float32))) == {1.0, 1.0 + 2.0**-7}
    assert float(moved.astype(jnp.float32).mean()) == pytest.approx(1.0 + 2.0**-11, abs=2.0**-13)
    config = changed(SMALL, model__parameters="bfloat16")
    setup = prepared(config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(setup.state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(setup.state.optimiser[1][0].nu)} == {"float32"}


@pytest.fixture(scope="module")
def fine_tuning(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Fine-tuning of a small checkpoint on records in files."""
    folder = tmp_path_factory.mktemp("fine")
    save_model(initial_model(SMALL), folder / "base")
    for name, first in (("train", 0), ("held_out", 1000)):
        made = [problem(first + seed, name == "held_out", "orders") for seed in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(
            json.dumps({"messages": [{"role": "user", "content": item.question}], "structure": to_json(item.structure)})
            + "\n"
            for item in made
        ))  # fmt: skip
    return changed(
        SMALL, model__checkpoint=str(folder / "base"), data__train=(str(folder / "train.jsonl"),),
        data__held_out=(str(folder / "held_out.jsonl"),), data__length=512, data__bins=4, evaluate_batches=1,
        optimiser__learning_rate=1e-2, steps=6, log_every=1,
    )  # fmt: skip


def test_fine_tuning_on_records(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    run_training(changed(fine_tuning, tensorboard=True, keep=1), tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(held_out) == 3 and held_out[-1] < held_out[0]
    parts = {"loss_serial", "loss_title", "loss_branch", "tokens_per_second", "gradient_norm"}
    assert parts <= lines[0].keys()
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert (tmp_path / "run" / "left_out.jsonl").read_text() == ""
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps == [6]
    assert load_model(tmp_path / "run" / "model").config.vocabulary == 768


def test_epochs_end_by_themselves(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    run_training(changed(fine_tuning, steps=0, epochs=1, evaluate_batches=0), tmp_path / "run", progress=False)
    once = len(losses(tmp_path / "run"))
    run_training(changed(fine_tuning, steps=0, epochs=3, evaluate_batches=0), tmp_path / "more", progress=False)
    assert 2 * once < len(losses(tmp_path / "more")) <= 3 * once + 3


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_adapters(weights: Any, fine_tuning: TrainConfig, tmp_path: Path) -> None:
    config = changed(fine_tuning, model__lora_rank=4, model__weights=weights, model__scan=weights == "int8")
    setup = prepared(config)
    trained = {path[-1] for path in flatten_dict(setup.state.params)}
    assert {"lora_down", "lora_up", "embedding"} <= trained and "scale" not in trained
    run_training(config, tmp_path / "run", progress=False)
    after = losses(tmp_path / "run")
    assert after[-1] < after[0]
    base, tuned = load_model(config.model.checkpoint), load_model(tmp_path / "run" / "model")
    kernels = [np.asarray(lm.params["layer_0"]["feed_forward"]["gate"]["kernel"]) - 0 for lm in (base, tuned)]
    difference = kernels[1] - kernels[0]
    if weights == "float":
        assert np.linalg.matrix_rank(difference, tol=1e-4) == 4
    assert np.abs(difference).max() > 1e-4
    np.testing.assert_array_equal(base.params["norm"]["scale"], tuned.params["norm"]["scale"])


def test_fresh_adapters_change_nothing_and_int8_little(fine_tuning: TrainConfig) -> None:
    folder = fine_tuning.model.checkpoint
    tokens = np.arange(1, 40)[None] % 700

    def logits(lm: LanguageModel) -> Any:
        layout = build_layout(tokens, lm.special_tokens)
        return np.asarray(lm.model.apply({"params": lm.params}, tokens, layout))

    plain = logits(load_model(folder))
    np.testing.assert_allclose(logits(load_model(folder, lora_rank=4)), plain, atol=1e-6)
    rounded = logits(load_model(folder, weights="int8"))
    error = np.abs(rounded - plain).max()
    assert 1e-6 < error < 0.05 * np.abs(plain).max()


CHANGED: dict[str, Any] = {
    "model.checkpoint": None, "model.vocabulary": 800, "model.layers": 2, "model.embed": 48, "model.heads": 1,
    "model.kv_heads": 2, "model.head": 8, "model.feed_forward": 48, "model.positions": "max",
    "model.siblings": "shared", "model.dtype": "bfloat16", "model.parameters": "bfloat16",
    "model.weights": None, "model.lora_rank": 2, "model.lora_alpha": None, "model.scan": True, "model.remat": True,
    "data.train": None, "data.held_out": None,
    "data.cache": None, "data.strict": None, "data.chat_template": None, "data.structured": False,
    "data.plain_every": 2, "data.fed_loss": True, "data.rows": 1, "data.length": 400, "data.bins": None,
    "data.short_steps": 0, "data.short_rows": 1, "data.short_length": 120, "data.recital_every": 3,
    "optimiser.learning_rate": 1e-2, "optimiser.warmup": 1.0, "optimiser.final": 0.5, "optimiser.weight_decay": 0.5,
    "optimiser.beta1": 0.5, "optimiser.beta2": 0.5, "optimiser.clip": 1e-4, "optimiser.accumulate": None,
    "mesh.data": None, "mesh.fsdp": None, "mesh.tensor": None, "steps": 3, "epochs": None, "seed": 1,
    "save_every": 3, "keep": 1, "evaluate_batches": 1, "log_every": 2, "tensorboard": True,
}  # fmt: skip
ELSEWHERE = {
    "model.checkpoint", "model.weights", "model.lora_alpha", "data.train", "data.held_out", "data.cache",
    "data.strict", "data.chat_template", "data.bins", "optimiser.accumulate", "mesh.data", "mesh.fsdp",
    "mesh.tensor", "epochs",
}  # fields that only mean something for a fine-tuning or a mesh, and are tested with one here  # fmt: skip
NAMES = [
    f"{section.name}.{inner.name}" if is_dataclass(section.default_factory) else section.name
    for section in fields(TrainConfig)
    for inner in (fields(section.default_factory) if is_dataclass(section.default_factory) else [section])
]


def test_every_field_is_in_the_table() -> None:
    assert set(NAMES) == set(CHANGED)
    assert {name for name, value in CHANGED.items() if value is None} == ELSEWHERE


@pytest.mark.parametrize("name", [name for name in NAMES if CHANGED[name] is not None])
def test_every_field_changes_the_run(name: str, tmp_path: Path) -> None:
    base, reference = changed(SMALL, log_every=1), "with short steps"
    if not name.startswith(("data.short", "data.recital")):  # one program less to compile
        base, reference = changed(base, data__short_steps=0), "without"
    if reference not in REFERENCE:
        REFERENCE[reference] = outcome(base, tmp_path / "reference")
    other = outcome(changed(base, **{name.replace(".", "__"): CHANGED[name]}), tmp_path / "changed")
    assert other != REFERENCE[reference]


def outcome(config: TrainConfig, output: Path) -> Any:
    """What a run leaves behind, and the program that it ran."""
    trained = run_training(config, output, progress=False)
    leaves = [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(trained.params)]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
    saved = sorted(int(folder.name) for folder in (output / "checkpoints").iterdir() if folder.name.isdigit())
    form = (config.model.scan, config.model.remat)  # the same numbers by another program: see the tests above
    return leaves, metrics, saved, sorted(p.name for p in output.iterdir()), trained.config, form


def test_fields_of_fine_tuning_change_the_batches(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    lm = initial_model(SMALL)

    def first(config: TrainConfig, name: str) -> Any:
        batches = train.loop.read_data(config, lm, tmp_path / name, False).batches
        (tmp_path / name).mkdir(exist_ok=True)
        return next(batches)

    for name in ("plain", "bins", "template"):
        (tmp_path / name).mkdir()
    plain = first(fine_tuning, "plain")
    assert (tmp_path / "plain" / "tokenised").exists()
    bins = first(changed(fine_tuning, data__bins=1, data__cache=str(tmp_path / "cache")), "bins")
    assert not np.array_equal(plain.tokens, bins.tokens)
    assert (tmp_path / "cache").exists() and not (tmp_path / "bins" / "tokenised").exists()


def test_a_chat_template_of_ones_own(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (tmp_path / "template.jinja").write_text(template)
    config = changed(fine_tuning, data__chat_template=str(tmp_path / "template.jinja"))
    lm = load(config, make_mesh({}))
    assert lm.tokenizer.chat_template == template


def test_memory_of_attention_grows_with_the_length() -> None:
    """Doubling a row from 4k to 8k tokens at most doubles what the compiler sets aside for a gradient."""
    shape = ModelConfig(vocabulary=64, embed=64, feed_forward=64, layers=1, heads=2, kv_heads=1, head=32)

    def bytes_of(length: int, attention: Attention) -> int:
        model = Transformer(shape, attention=attention)
        params = nn.meta.unbox(abstract_parameters(model))
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(params: Any, tokens: Any, layout: Any) -> Any:
            return model.apply({"params": params}, tokens, layout, head=False).sum()

        lowered = jax.jit(jax.grad(loss)).lower(params, tokens, Layout(tokens, tokens, tokens, tokens))
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    assert bytes_of(8192, chunked) <= 2.001 * bytes_of(4096, chunked)  # arrays are aligned
    assert bytes_of(4096, dense) > 3.5 * bytes_of(2048, dense), "the measure sees what is quadratic"
