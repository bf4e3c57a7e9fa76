"""Training run: resumable, and a pure function of its configuration and data."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from aspd_jax.configuration import config_from_dict
from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.files import write_whole, writing
from aspd_jax.formats import digest, draft_file
from aspd_jax.formats.side_files import read_object
from aspd_jax.journal import append
from aspd_jax.language_model import LanguageModel, save_adapter, save_draft_heads, save_model
from aspd_jax.progress import Bar
from aspd_jax.sharding import make_mesh
from train.batches import Batch, record_batches, record_held_out, record_steps
from train.checkpoints import Checkpoints
from train.config import TrainConfig
from train.loss import Sums
from train.metrics import memory_in_use, model_flops, open_metrics, peak_flops
from train.records import Records
from train.setup import Setup, load, set_up
from train.step import TrainState, evaluation_sums, join, part_losses, train_step

# Settings that may change when a run is resumed, because they do not change what it computes.
MAY_CHANGE = (
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "optimiser.accumulate", "model.remat"),
    *("data.cache", "save_every", "keep", "log_every"),
)


class Data(NamedTuple):
    """Data of a run: training batches, held-out batches, total number of steps, names of the tokenised files by key."""

    batches: Any
    held_out: list[Batch]
    steps: int
    files: dict[str, list[str]]


def train(config: TrainConfig, output: Path, progress: bool = True) -> LanguageModel:
    """Train a model and return it.

    `output` then holds model/ (Hugging Face layout) or, with LoRA, adapter/ (PEFT's layout), or the file of the draft
    heads; and metrics.jsonl, config.json, inputs.json and checkpoints/. Starting a run again with the same
    configuration and input files resumes from its last checkpoint, on any mesh.

    Args:
        config: configuration.
        output: folder of the run.
        progress: whether to print a summary of the data and a progress bar.

    Raises:
        ConfigError: `output` holds a run with another configuration or other input files, or the configuration is
            invalid.
        DataError: the data cannot be read.
        CheckpointError: the checkpoint to start from cannot be read.
    """
    first_process = jax.process_index() == 0
    mesh = make_mesh(vars(config.mesh))
    if jax.process_count() > 1 and mesh.size != jax.device_count():
        raise ConfigError(
            f"mesh: expected the {jax.device_count()} devices of all processes, got {mesh.size}. "
            "Set mesh.data, mesh.fsdp or mesh.tensor."
        )
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    result = output / result_name(config)
    started = result.exists() or any(step.name.isdigit() for step in (output / "checkpoints").glob("*"))
    if first_process:
        _claim(output / "config.json", started, "values", json.loads(json.dumps(asdict(config))))
    lm = load(config, mesh)
    data = read_data(config, lm, output, progress and first_process)
    if first_process:
        inputs = {"model.checkpoint": digest(config.model.checkpoint), **data.files}
        _claim(output / "inputs.json", started, "contents", inputs)
    setup = set_up(config, lm, mesh, data.steps)
    with Checkpoints(output / "checkpoints", config.keep, best=bool(data.held_out)) as checkpoints:
        state = _run(config, setup, data, checkpoints, output, progress and first_process)
    trained = setup.language_model(state)
    if first_process and not result.exists():
        if config.draft.heads:
            save_draft_heads(trained, result)
        elif config.model.lora_rank:
            save_adapter(trained, result, config.model.checkpoint)
        else:
            save_model(trained, result)
    return trained


def result_name(config: TrainConfig) -> str:
    """Return the name of the trained model, adapter or file of draft heads within the folder of a run."""
    if config.draft.heads:
        return draft_file.FILE
    return "adapter" if config.model.lora_rank else "model"


def read_data(config: TrainConfig, lm: LanguageModel, output: Path, progress: bool) -> Data:
    """Open the data of a run, and write the records that cannot be used to left_out.jsonl in `output`."""
    special = lm.codec.special
    cache = Path(config.data.cache) if config.data.cache else output / "tokenised"
    if jax.process_index() > 0:
        multihost_utils.sync_global_devices("tokenised")  # process 0 tokenises; the others read its cache
    with writing(cache):
        records = Records(lm, config.data.train, config.data, cache)
        held_out_records = Records(lm, config.data.held_out, config.data, cache) if config.evaluate_batches else None
    if jax.process_index() == 0:
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("tokenised")
        problems = records.problems + (held_out_records.problems if held_out_records else [])
        write_whole(output / "left_out.jsonl", "".join(json.dumps(p._asdict()) + "\n" for p in problems))
    if progress:
        print(f"training data: {records.report()}")
        if held_out_records:
            print(f"held-out data: {held_out_records.report()}")
    return Data(
        record_batches(records, special, config, config.epochs if not config.steps else None),
        record_held_out(held_out_records, special, config) if held_out_records else [],
        config.steps or record_steps(records, config),
        {"data.train": records.files, "data.held_out": held_out_records.files if held_out_records else []},
    )


def _run(
    config: TrainConfig, setup: Setup, data: Data, checkpoints: Checkpoints, output: Path, progress: bool
) -> TrainState:
    batches, first = data.batches, checkpoints.latest
    if first:
        state, position = checkpoints.restore(first, setup.free_state())
        batches.set_state(position)
    else:
        state = setup.state
    update = train_step(setup.model, setup.optimiser, config.optimiser.accumulate)
    log = open_metrics(output, first) if jax.process_index() == 0 else None
    flops = model_flops(setup.lm.config, join(state.params, setup.frozen), config.data.length)
    peak = peak_flops(setup.mesh)
    bar = Bar(range(first, data.steps), initial=first, total=data.steps, disable=not progress, unit="step")
    since, tokens, skipped = time.monotonic(), 0, float(state.skipped)
    for done in bar:
        batch = next(batches)
        tokens += batch.tokens.size
        state, metrics = update(state, setup.frozen, setup.place(batch))
        step = done + 1
        last = step == data.steps
        if step % config.log_every == 0 or last:
            values = {name: float(value) for name, value in metrics.items()}
            seconds = time.monotonic() - since
            values["tokens_per_second"] = tokens / seconds
            if peak:
                values["model_flop_utilisation"] = flops * tokens / seconds / peak
            if (used := memory_in_use()) is not None:
                values["peak_bytes"] = used
            if values["skipped"] > skipped:
                new = int(values["skipped"] - skipped)
                bar.write(f"step {step}: skipped {new} updates since the last report: loss or gradient not finite")
                skipped = values["skipped"]
            bar.set_postfix(loss=f"{values['loss']:.4f}", tokens_per_second=f"{values['tokens_per_second']:.0f}")
            if log:
                append(log, {"step": step, **values})
            since, tokens = time.monotonic(), 0
        if step % config.save_every == 0 or last:
            jax.block_until_ready(state)
            paused, loss = time.monotonic(), None
            if data.held_out:
                held_out = evaluate(setup, state, data.held_out)
                loss = held_out["held_out_loss"]
                if log:
                    append(log, {"step": step, **held_out})
            checkpoints.save(step, state, batches.get_state(), loss)
            since += time.monotonic() - paused
    if log:
        log.close()
    return state


def evaluate(setup: Setup, state: TrainState, held_out: list[Batch]) -> dict[str, float]:
    """Return the held-out loss over all targets and by part."""
    batch_sums = [evaluation_sums(state.params, setup.frozen, setup.place(batch), setup.model) for batch in held_out]
    sums = Sums(*(sum(part[1:], part[0]) for part in zip(*batch_sums, strict=True)))
    values = {"loss": sums.mean(), **part_losses(sums)}
    return {f"held_out_{name}": float(value) for name, value in values.items()}


def export(run: Path, output: Path, step: int | None = None, dtype: str | None = None) -> int:
    """Write the model of a run's checkpoint as a Hugging Face folder, and return the step.

    Args:
        run: folder of the run.
        output: folder of the model.
        step: step of the checkpoint; None: the last one.
        dtype: see `save_model`.

    Raises:
        CheckpointError: the run has no such checkpoint.
    """
    file = run / "config.json"
    if not file.exists():
        raise CheckpointError(f"{run}: expected a training run with config.json, got none")
    config = config_from_dict(TrainConfig, read_object(file), str(file))
    mesh = make_mesh({})
    lm = load(config, mesh)
    setup = set_up(config, lm, mesh, 1)
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        chosen = checkpoints.latest if step is None else step
        if chosen not in checkpoints.steps:
            steps = ", ".join(map(str, checkpoints.steps)) or "none"
            raise CheckpointError(f"{run}: expected a checkpoint of step {steps}, got {chosen}")
        like = setup.free_state()
        like = like._replace(optimiser=jax.tree.map(lambda _: ocp.PLACEHOLDER, like.optimiser))
        state, _ = checkpoints.restore(chosen, like)
    save_model(setup.language_model(state), output, dtype)
    return chosen


def _claim(file: Path, started: bool, what: str, values: dict[str, Any]) -> None:
    """Write values to a file of a run, or check that it has them.

    Args:
        file: file in the folder of the run.
        started: whether the run has a checkpoint or a result, so that its values are fixed.
        what: noun for the values, for messages.
        values: values by key.

    Raises:
        ConfigError: the run has other values.
        CheckpointError: the file is damaged.
    """
    if not (started and file.exists()):
        write_whole(file, json.dumps(values, indent=2) + "\n")
        return
    new, old = (flatten_dict(one, sep=".") for one in (values, read_object(file)))
    different = sorted(key for key in new | old if new.get(key) != old.get(key) and key not in MAY_CHANGE)
    if different:
        raise ConfigError(
            f"{file.parent}: expected the {what} with which the run began, got other {what} of {', '.join(different)}. "
            "Choose another folder, or delete this one."
        )
