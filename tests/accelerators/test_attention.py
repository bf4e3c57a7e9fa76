"""Attention for training: the compilers take its kernels, and what they need grows with the row only.

S tokens of a row.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="make test-accelerators has an environment of its own")
pytest.importorskip("jax_plugins.xla_cuda12", reason="make test-accelerators has an environment of its own")

from aspd.aot.abstract import placed, replicated
from aspd.aot.report import Compiled
from aspd.aot.topology import open_topology
from aspd_jax.layout import Layout
from aspd_jax.model.attention import FULL_PASS_BACK_ENDS, View
from tests.accelerators.programs import small
from tests.helpers.hlo import instructions

HEADS, QUERIES, SIZE = 8, 4, 128  # kv heads, query heads of each
# Bytes of temporary memory for a token: on a GPU an eighth of what its queries take, and no copy of them; on a TPU,
# where arrays are copied into the form that kernels take, 260 MiB for 8,192 tokens.
MOST = {"h100:1x1x1": 1024, "v5e:1x1": 260 * 2**20 // 8192}
CASES = [
    pytest.param(name, length, marks=slow)
    for name, length, slow in (
        ("h100:1x1x1", 384, ()),
        ("h100:1x1x1", 8192, (pytest.mark.slow,)),
        ("v5e:1x1", 8192, (pytest.mark.slow,)),
    )
]


@cache
def gradients(on: str, name: str, S: int) -> Compiled:
    """Result and slopes of query, key and value, in bfloat16."""
    keys, queries = (1, S, HEADS, SIZE), (1, S, HEADS, QUERIES, SIZE)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (queries, keys, keys, queries)]
    layout = Layout(*[jax.ShapeDtypeStruct((1, S), jnp.int32)] * 4)

    def both(
        query: jax.Array, key: jax.Array, value: jax.Array, slope: jax.Array, layout: Layout
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        attend = partial(FULL_PASS_BACK_ENDS[name], view=View(layout, layout), siblings="invisible", window=None)
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(slope)

    return small(on, both, *placed((*given, layout), replicated(open_topology(on), None)))


@pytest.mark.parametrize("on, length", CASES)
def test_memory_is_linear(on: str, length: int) -> None:
    """Check that memory is linear and no array is [S, S], not even a mask."""
    of = gradients(on, "flash", length)
    assert of.memory is not None
    assert of.memory.temporary <= MOST[on] * length
    assert not [one for one in instructions(of.text) for array in one.arrays if array.shape.count(length) > 1]


@pytest.mark.parametrize("on, length", CASES)
def test_chunks_need_more(on: str, length: int) -> None:
    """Negative control."""
    of = gradients(on, "chunked", length)
    assert of.memory is not None
    assert of.memory.temporary > MOST[on] * length
