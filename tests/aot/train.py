"""Training step compiled for a target chip."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from aspd_jax.layout import Layout
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.sharding import MESH_AXES, make_mesh, named_sharding, shardings
from tests.aot.abstract import placed
from tests.aot.report import Compiled, compile_for, gib
from tests.aot.topology import Topology
from train.batches import Batch
from train.config import TrainConfig
from train.plan import Plan, plan, planned_shape
from train.setup import trained_model
from train.step import abstract_state, is_trained, make_optimiser, train_step


def trace_step(config: TrainConfig, shape: ModelConfig, mesh: Mesh) -> Any:
    """Trace the training step of a configuration for a model shape, as `train.loop` runs it."""
    model = trained_model(config, shape, mesh)
    boxed = abstract_parameters(model)
    frozen = {
        path: leaf
        for path, leaf in flatten_dict(placed(nn.meta.unbox(boxed), shardings(boxed, mesh))).items()
        if not is_trained(path, model.config)
    }
    optimiser = make_optimiser(config.optimiser, max(1, config.steps))
    state = abstract_state(model, optimiser, config.model.parameters)
    rows = (config.data.rows, config.data.length)

    def tokens(dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(rows, dtype, sharding=named_sharding(("batch", "sequence"), rows, mesh))

    batch = Batch(tokens(), Layout(tokens(), tokens(), tokens(), tokens()), tokens(jnp.float32), tokens())
    return train_step(model, optimiser, config.optimiser.accumulate).trace(state, unflatten_dict(frozen), batch)


def compile_step(config: TrainConfig, topology: Topology) -> tuple[Compiled, Plan]:
    """Compile the training step of a configuration, and return it with the plan of `--plan`."""
    mesh = make_mesh({axis: getattr(config.mesh, axis) for axis in MESH_AXES}, topology.devices)
    shape, planned = planned_shape(config), plan(config)
    return compile_for(trace_step(config, shape, mesh), topology, mesh.size, planned.weights), planned


def train_table(compiled: Compiled, planned: Plan) -> str:
    """Return a Markdown table of the figures of a training step on each device."""
    rows = [("fits", compiled.fit), ("`--plan`", gib(planned.total))]
    if (memory := compiled.memory) is not None:
        rows += [("arguments", gib(memory.arguments)), ("temporary", gib(memory.temporary))]
        rows += [("aliased", gib(memory.aliased)), ("in all", gib(memory.total)), ("peak", gib(memory.peak))]
        rows += [("TFLOP of products", f"{compiled.flops / 1e12:.1f}"), ("ms at least", f"{compiled.milliseconds:.0f}")]
    return "\n".join(["| on each device | GiB |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
