"""Checkpoints of a run: the state and where the data stands, written while training goes on (Orbax)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from aspd_jax.errors import OutputError
from aspd_jax.files import writing
from train.train_step import TrainState

METRIC = "held_out_loss"


class Checkpoints:
    """Checkpoints in a folder.

    A checkpoint appears whole or not at all, so a run that is killed while saving goes on from the one before.

    Args:
        keep: how many of the latest stay.
        best: also keep the one with the lowest held-out loss.
        read_only: change nothing in the folder.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writing():
            self._manager.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Name the folder where writing fails; the checkpoint under way is removed then."""
        try:
            with writing(self._folder):
                yield
        except OutputError:
            for unfinished in self._folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    @property
    def latest(self) -> int:
        """The last step with a checkpoint, or 0."""
        return self._manager.latest_step() or 0

    @property
    def steps(self) -> list[int]:
        """All steps with a checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, data: dict[str, Any], loss: float | None = None) -> None:
        """Start to write; returns when the state has been copied."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
        with self._writing():
            self._manager.save(step, args=args, metrics=None if loss is None else {METRIC: loss})

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """A state, in the shardings of `like`, whatever mesh it was saved from; and where the data stood."""

        def abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(abstract, like)), data=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=args)
        return restored["state"], restored["data"]
