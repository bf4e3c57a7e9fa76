"""The kernel as a GPU runs it, against the definition; `tests/accelerator.sh` runs these tests.

On CPU, `test_flash_decode.py` interprets the same kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from aspd_jax.model.attention import DECODE_BACK_ENDS
from tests.aspd_jax.model import test_flash_decode as decoding

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")
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
    decoding.without_blocks(monkeypatch)
    jax.clear_caches()
    assert error(computed("flash_decode"), expected) > 5 * TOLERANCE[dtype]
