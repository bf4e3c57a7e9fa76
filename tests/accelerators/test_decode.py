"""Programs of decoding: what they keep, move, copy and say; each property with a program that does not have it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="make test-accelerators has an environment of its own")
pytest.importorskip("jax_plugins.xla_cuda12", reason="make test-accelerators has an environment of its own")

from aspd_jax.model.cache import Bucket
from aspd_jax.shapes import SHAPES
from aspd_jax.sharding import make_mesh, named_sharding
from tests.accelerators.programs import LAYERS, Case, copies, decoding, small, sorts
from tests.aot.abstract import replicated
from tests.aot.report import local_bytes
from tests.aot.topology import open_topology
from tests.helpers.hlo import count_collectives

TENSOR, BOTH = (("tensor", 8),), (("data", 2), ("tensor", 4))
FEW = [  # one of each kind, for the gate
    Case("v6e:1x1", "8b", 16),
    Case("v5e:2x4", "8b", 16, mesh=TENSOR),
    Case("v5p:2x2x2", "8b", 1, batch=16, mesh=BOTH),
    Case("h100:1x1x1", "7b", 1),
    Case("h100:1x1x8", "8b", 16, mesh=TENSOR),
    Case("h100:1x1x1", "8b", 16, attention="flash_decode"),
]
CASES = [
    *FEW,
    Case("v6e:1x1", "8b", 1),
    Case("v6e:1x1", "7b", 16, weights="int8"),
    Case("v6e:1x1", "8b", 512),  # prefill
    Case("v5e:2x4", "8b", 1, mesh=TENSOR),
    Case("v5p:1x1x1", "8b", 16, slots=32768),
    Case("h100:1x1x1", "7b", 16),
    Case("h100:1x1x1", "8b", 1, slots=32768, attention="flash_decode"),
    Case("h100:1x1x1", "8b", 16, slots=32768, attention="flash_decode"),
    Case("h100:1x1x8", "8b", 16, mesh=TENSOR, attention="flash_decode"),
]


def cases(only: Any = lambda case: True) -> Any:
    """The cases as parameters; those that are not for the gate are slow."""
    chosen = [
        pytest.param(case, id=str(case), marks=() if case in FEW else pytest.mark.slow) for case in CASES if only(case)
    ]
    return pytest.mark.parametrize("case", chosen)


@cases(only=lambda case: case.width <= 16 and not case.topology.startswith("h100"))
def test_traffic_is_bounded(case: Case) -> None:
    """Check XLA's count against needed bytes; XLA has none for GPUs, and counts more than a step moves."""
    of = decoding(case).compiled
    assert of.traffic is not None
    assert of.needed <= of.traffic <= (3.8 if case.mesh else 2.6) * of.needed


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flash_decode", "decode"])
def test_scores_of_many_queries_stay_on_the_chip(attention: str) -> None:
    """Check at 32k slots; in the negative control, scores go through HBM."""
    of = decoding(Case("h100:1x1x1", "8b", 16, slots=32768, attention=attention))
    scores = 4 * 16 * of.lm.config.heads * 32768
    assert (of.temporary < scores) == (attention == "flash_decode")


@pytest.mark.slow
def test_a_prompt_beside_answers_moves_little_more() -> None:
    """Check 64 tokens of a prompt in a step of 15 answers."""
    one_longer, any_longer = Bucket(16, 128, 16, 2048, 128), Bucket(16, 128, 128, 2048)
    of, control = (
        decoding(Case("v6e:1x1", "8b", 16, batch=16, bucket=bucket)).compiled for bucket in (one_longer, any_longer)
    )
    assert of.traffic is not None and of.traffic <= 2.6 * of.needed
    assert control.traffic is not None and control.traffic > 1.25 * of.traffic


@pytest.mark.slow
def test_a_row_that_feeds_alone_moves_what_it_would_in_a_cache_of_its_own() -> None:
    """Check one of 16 rows; in the negative control, all rows are read."""
    alone, every = Bucket(1, 1, 1, 2048), Bucket(16, 16, 1, 2048)
    own, of_many, control = (
        decoding(Case("v6e:1x1", "8b", 1, batch=batch, bucket=bucket)).compiled.traffic
        for batch, bucket in ((1, alone), (16, alone), (16, every))
    )
    assert own is not None and of_many is not None and of_many <= 1.02 * own
    assert control is not None and control > 1.2 * own


@cases()
def test_temporary_memory_is_below_a_layer(case: Case) -> None:
    """Check that no kernel is kept in another form."""
    of = decoding(case)
    assert of.temporary < local_bytes(of.lm.params["layer_0"])


@cases()
def test_the_cache_is_given_and_not_copied(case: Case) -> None:
    of = decoding(case)
    ways = 1 if of.lm.mesh is None else of.lm.mesh.size
    layer = 2 * case.batch * case.slots * of.lm.config.kv_heads * of.lm.config.head_dim // ways  # bytes of its keys
    assert of.compiled.memory is not None and of.compiled.memory.aliased >= 2 * LAYERS * layer
    assert not [str(copy) for copy in copies(of.compiled.text) if case.slots in copy.shape and copy.bytes >= layer]


@cases(only=lambda case: case.mesh)
def test_collectives_are_bounded(case: Case) -> None:
    """Check their bytes, and that none is on keys and values, or on logits, not even where tokens are sampled."""
    of = decoding(case)
    c, said = of.lm.config, count_collectives(of.compiled.text)
    assert said, "layers split over tensor have to be added up"
    halves = 2 * c.layers * of.bucket.tokens * c.hidden_size * 2  # bytes of the outputs, which tensor adds up
    assert sum(total.bytes for total in said) <= 2 * halves
    assert not on_axis(said, case.slots, 3) and not on_axis(said, of.lm.config.padded_vocab_size)


def on_axis(said: Any, size: int, rank: int = 1) -> list[str]:
    """Collectives on arrays of at least `rank` axes, one of them of this size."""
    shapes = [(one.array, one.array.partition("[")[2].rstrip("]").split(",")) for one in said]
    return [array for array, shape in shapes if str(size) in shape and len(shape) >= rank]


@cases()
def test_no_sort_over_the_vocabulary(case: Case) -> None:
    of = decoding(case)
    size, padded = SHAPES[case.shape].vocab_size, of.lm.config.padded_vocab_size
    assert not sorts(of.compiled.text, {size, *(padded // ways for ways in (1, 4, 8))})


@cases(only=lambda case: case.mesh == TENSOR)
def test_embedding_and_head_are_split(case: Case) -> None:
    of = decoding(case)
    for name in ("embedding", "head"):
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(of.lm.params[name]))
        assert local_bytes(of.lm.params[name]) == whole // 8


@pytest.mark.parametrize("name", ["v5e:2x4", "h100:1x1x8"])
def test_gathered_logits_are_seen(name: str) -> None:
    """Negative control: logits that every device asks for."""
    mesh = make_mesh(dict(TENSOR), open_topology(name).devices)
    logits = jax.ShapeDtypeStruct(
        (16, 4096), jnp.float32, sharding=named_sharding((None, "vocabulary"), (16, 4096), mesh)
    )
    whole = named_sharding((None, None), (16, 4096), mesh)
    compiled = small(name, lambda x: jax.lax.with_sharding_constraint(jnp.exp(x), whole), logits)
    said = count_collectives(compiled.text)
    assert on_axis(said, 4096) and sum(total.bytes for total in said) >= 4 * 16 * 4096


@pytest.mark.parametrize("name", ["v6e:1x1", "h100:1x1x1"])
def test_bad_programs_are_seen(name: str) -> None:
    """Negative controls: a kernel in another form, a cache that is not given away, a sort."""
    place = replicated(open_topology(name), None)

    def of(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def steps(kernel: jax.Array, cache: jax.Array, x: jax.Array, n: jax.Array) -> Any:
        other = jax.lax.optimization_barrier(jnp.sin(kernel).T.reshape(-1, 8, kernel.shape[0]))

        def one(state: Any) -> Any:
            i, x, cache = state
            y = jax.lax.sort(jnp.einsum("pqk,k->pq", other, x).reshape(-1))
            return i + 1, y, jax.lax.dynamic_update_slice(cache, y[None], (i, jnp.int32(0)))

        return jax.lax.while_loop(lambda s: s[0] < n, one, (jnp.int32(0), x, cache))

    compiled = small(name, steps, of(8192, 8192), of(16384, 8192), of(8192), of(dtype=jnp.int32))
    assert compiled.memory is not None
    assert compiled.memory.aliased < 2 * 16384 * 8192
    assert compiled.memory.temporary > 2 * 8192 * 8192 / 2
    assert sorts(compiled.text, {8192})
    assert [copy for copy in copies(compiled.text) if copy.shape == (16384, 8192)]
    assert compiled.traffic is None or compiled.traffic > 3 * 2 * 8192 * 8192  # read, written in another form, read
    given = small(name, lambda cache, x: cache.at[3].set(x), of(16384, 8192), of(8192), donate_argnums=0)
    assert given.memory is not None and given.memory.aliased >= 2 * 16384 * 8192
    assert not [copy for copy in copies(given.text) if copy.shape == (16384, 8192)]


@pytest.mark.parametrize("name", ["v5e:2x4", "h100:1x1x8"])
def test_gathered_rows_are_seen(name: str) -> None:
    """Negative control: some rows of a cache, taken by number from a mesh with a data axis."""
    mesh = make_mesh(dict(BOTH), open_topology(name).devices)
    place = named_sharding(("batch", None, "kv_heads", None), (16, 2048, 8, 128), mesh)
    keys = jax.ShapeDtypeStruct((16, 2048, 8, 128), jnp.bfloat16, sharding=place)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=named_sharding((None,), (2,), mesh))
    compiled = small(name, lambda keys, rows: jnp.take(keys, rows, axis=0), keys, rows)
    assert on_axis(count_collectives(compiled.text), 2048, 3)
