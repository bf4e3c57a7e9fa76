"""Checkpoints of a run with the training state and the data position, written asynchronously by Orbax."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from aspd_jax.errors import OutputError
from aspd_jax.files import writing
from train.step import TrainState

METRIC = "held_out_loss"


class Checkpoints:
    """Checkpoints in a folder.

    Checkpoints are atomic: a run that is killed while saving resumes from the previous one.

    Args:
        folder: folder of the checkpoints.
        keep: number of latest checkpoints to keep.
        best: whether to keep the checkpoint with the lowest held-out loss too.
        read_only: whether the folder must not change.
    """

    def __init__(self, folder: Path, keep: int = 1, best: bool = False, read_only: bool = False) -> None:
        policies: list[Any] = [LatestN(keep)]
        if best:
            lowest = BestN(
                get_metric_fn=lambda metrics: metrics[METRIC], reverse=True, n=1, keep_checkpoints_without_metrics=False
            )
            policies.append(lowest)
        self._folder = folder.absolute()
        with writing(folder):
            self._manager = ocp.CheckpointManager(
                self._folder,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=None if read_only else AnyPreservationPolicy(policies),
                    cleanup_tmp_directories=not read_only,
                    read_only=read_only,
                    best_fn=(lambda metrics: metrics[METRIC]) if best and not read_only else None,
                    best_mode="min",
                ),
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        with self._writing():
            self._manager.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Name the folder in write errors, and remove the unfinished checkpoint."""
        try:
            with writing(self._folder):
                yield
        except OutputError:
            for unfinished in self._folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    @property
    def latest(self) -> int:
        """Last step with a checkpoint; 0: none."""
        return self._manager.latest_step() or 0

    @property
    def steps(self) -> list[int]:
        """Sorted steps with a checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, data: dict[str, Any], loss: float | None = None) -> None:
        """Start writing a checkpoint, and return when the state has been copied.

        Args:
            step: step of the checkpoint.
            state: training state.
            data: position of the data stream.
            loss: held-out loss; None: not measured.
        """
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data))
        with self._writing():
            self._manager.save(step, args=args, metrics=None if loss is None else {METRIC: loss})

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Return the state of a step and the position of the data.

        Args:
            step: step of the checkpoint.
            like: state as shapes with shardings, of any mesh; leaves `ocp.PLACEHOLDER` are not read.
        """
        restored_state = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
        args = ocp.args.Composite(state=restored_state, data=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        return restored["state"], restored["data"]
