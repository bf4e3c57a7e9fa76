"""The kernels as an accelerator runs them, against the definition; `tests/accelerator.sh` runs these tests.

On CPU, `test_flash.py` and `test_flash_decode.py` interpret the same kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd_jax import build_layout
from aspd_jax.layout import Layout
from aspd_jax.model import flash_decode
from aspd_jax.model.attention import DECODE_BACK_ENDS, FULL_PASS_BACK_ENDS, View
from tests.aspd_jax.model import test_flash_decode as decoding
from tests.aspd_jax.model.test_flash import END, SPECIAL, START

pytestmark = pytest.mark.skipif(jax.default_backend() == "cpu", reason="no accelerator")
# Relative errors of products in tf32 (float32 inputs) and in bfloat16.
TOLERANCE = {"float32": 5e-3, "bfloat16": 2e-2}
by_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def error(got: jax.Array, expected: jax.Array) -> float:
    """Norm of the difference, relative to the expected norm; infinite if anything is not finite."""
    x, y = (np.asarray(of, np.float64) for of in (got, expected))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y)) if np.isfinite(x).all() else float("inf")


@by_dtype
@pytest.mark.parametrize("heads", [(2, 3, 64), (8, 4, 128)])
@pytest.mark.parametrize("window", [None, 9])
def test_decoding(dtype: str, heads: tuple[int, int, int], window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check interleaved branches, padding, discarded and unused slots; negative control: a mask without blocks."""
    for name, size in zip("KGH", heads, strict=True):
        monkeypatch.setattr(decoding, name, size)
    rows = [[[1] * 30, [([5], [6] * 30), ([7], [8] * 30), ([9], [10] * 9)]], [[1] * 250]]
    *arrays, view = decoding.scene(rows, 0)
    arrays = [array.astype(dtype) for array in arrays]
    args = (*arrays, view, window)
    real = np.asarray(view.mask("invisible", window).any(axis=2))

    def computed(name: str) -> Any:
        return np.asarray(jax.jit(DECODE_BACK_ENDS[name], static_argnums=4)(*args), np.float64)[real]

    with jax.default_matmul_precision("highest"):
        expected = computed("reference")
    assert error(computed("flash_decode"), expected) < TOLERANCE[dtype]
    plain = flash_decode.fields
    monkeypatch.setattr(flash_decode, "fields", lambda of: plain(of)._replace(block=0 * plain(of).block))
    jax.clear_caches()
    assert error(computed("flash_decode"), expected) > 5 * TOLERANCE[dtype]


@by_dtype
@pytest.mark.parametrize(("siblings", "window"), [("invisible", None), ("shared", None), ("invisible", 100)])
def test_full_passes_and_gradients(dtype: str, siblings: Any, window: int | None) -> None:
    """Check packed rows with blocks, at the tile sizes of the device; other siblings are the negative control."""
    length, groups = 1000, (4, 2, 64)
    keys = (2, length, 4, 64)
    sizes = ((2, length, *groups), keys, keys, (2, length, *groups))
    tokens = np.full((2, length), 9)
    for at in (100, 520):
        for branch in range(4):
            tokens[:, at + 80 * branch] = START
            tokens[:, at + 80 * branch + 79] = END
        tokens[:, at + 320] = SPECIAL.parallel_end
    owner = np.array([[1] * 480 + [2] * 500 + [0] * 20, [1] * length])
    layout = Layout(*map(jnp.asarray, build_layout(tokens, SPECIAL, sequence=owner)))
    random = np.random.default_rng(0)
    *of, slope = (jnp.asarray(random.standard_normal(size), dtype) for size in sizes)
    slope = jnp.where((layout.sequence > 0)[..., None, None, None], slope, 0)

    @partial(jax.jit, static_argnums=(0, 1))
    def computed(name: str, siblings: Any, arrays: Any, layout: Layout) -> Any:
        *of, slope = arrays
        attention = partial(FULL_PASS_BACK_ENDS[name], view=View(layout, layout), siblings=siblings, window=window)
        out, pull = jax.vjp(attention, *of)
        return jnp.where((layout.sequence > 0)[..., None, None, None], out, 0), *pull(slope)

    args = [*of, slope], layout  # as arguments: XLA would fold constants on the host, for minutes
    with jax.default_matmul_precision("highest"):
        expected = computed("reference", siblings, *args)
    for got, right in zip(computed("flash", siblings, *args), expected, strict=True):
        assert error(got, right) < TOLERANCE[dtype]
    other = computed("flash", "shared" if siblings == "invisible" else "invisible", *args)
    assert error(other[0], expected[0]) > 5 * TOLERANCE[dtype]
