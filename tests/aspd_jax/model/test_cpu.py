"""Forms for CPU: results equal those of the plain forms, and the compiled programs differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aspd_jax.model import cpu
from aspd_jax.model.cpu import einsum, materialise
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import abstract_parameters
from tests.aspd_jax.model.test_model import BASE, BLOCK, fed


def numbers(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(prod(shape)).normal(size=shape), dtype)


def both_ways(program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], ...]:
    """A program with forms for CPU, and with the plain ones; compiled each."""

    def plainly(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "PLAIN", True)
            return program(*args)

    return jax.jit(lambda *args: program(*args)), jax.jit(plainly)


# Rows, sizes of the inputs and of the features, of a model with 8 query heads and 2 kv heads of size 16.
PRODUCTS = {
    "queries, keys and values": ((5,), (96,), (2, 6, 16)),
    "one token": ((1,), (96,), (2, 6, 16)),
    "one token, large": ((1,), (288,), (2, 6, 64)),
    "of a full pass": ((2, 7), (96,), (2, 6, 16)),
    "after attention": ((5,), (8, 16), (96,)),
    "gate and up": ((5,), (96,), (2, 160)),
    "down": ((5,), (160,), (96,)),
    "head": ((5,), (96,), (301,)),
    "down of an adapter": ((5,), (8, 16), (3,)),
    "up of an adapter": ((5,), (3,), (2, 6, 16)),
    "none": ((2, 0), (96,), (96,)),
    "many axes": ((2, 3), (3, 5, 2), (2, 7)),
}


def equation_of(inputs: int, outputs: int) -> str:
    """The equation of a kernel with so many axes of each kind."""
    ins, outs = "IJK"[:inputs], "XYZ"[:outputs]
    return f"...{ins},{outs + ins}->...{outs}"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "sizes", "features"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_is_the_sum_over_its_inputs(
    rows: tuple[int, ...],
    sizes: tuple[int, ...],
    features: tuple[int, ...],
    dtype: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, kernel = numbers(*rows, *sizes, dtype=dtype), numbers(*features, *sizes, dtype=dtype)
    matrix = np.asarray(kernel, np.float64).reshape(prod(features), prod(sizes))
    exact = (np.asarray(x, np.float64).reshape(-1, prod(sizes)) @ matrix.T).reshape(*rows, *features)
    equation = equation_of(len(sizes), len(features))
    for run in both_ways(lambda x, kernel: einsum(equation, x, kernel, jnp.float32), monkeypatch):
        out = run(x, kernel)
        assert out.shape == (*rows, *features) and out.dtype == jnp.float32
        np.testing.assert_allclose(out, exact, atol=2e-4)


def test_sums_are_not_rounded_to_the_dtype_of_the_inputs() -> None:
    """Check logits of bfloat16 models near 20, where the spacing of bfloat16 is 0.125."""
    x, kernel = numbers(3, 64, dtype=jnp.bfloat16), 3 * numbers(40, 64, dtype=jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    assert np.abs(einsum("...D,VD->...V", x, kernel, jnp.float32) - exact).max() < 1e-3
    assert np.abs(np.asarray(einsum("...D,VD->...V", x, kernel), np.float64) - exact).max() > 1e-2


def test_it_has_the_same_gradients() -> None:
    x, kernel = numbers(3, 4, 16), numbers(32, 4, 16)
    matrix = kernel.reshape(32, 64).T
    ours = jax.grad(lambda x, kernel: jnp.sin(einsum(equation_of(2, 1), x, kernel)).sum(), (0, 1))(x, kernel)
    plain = jax.grad(lambda x, matrix: jnp.sin(x.reshape(3, 64) @ matrix).sum(), (0, 1))(x, matrix)
    np.testing.assert_allclose(ours[0], plain[0], atol=2e-3)
    np.testing.assert_allclose(ours[1], plain[1].T.reshape(32, 4, 16), atol=2e-3)


@pytest.mark.several
@pytest.mark.parametrize("split", [("a", None, None), (None, None, "a")])
def test_a_kernel_may_lie_on_several_devices(split: tuple[str | None, ...]) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("a",))
    x, kernel = numbers(2, 64), numbers(4, 6, 64)
    spread = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(*split)))
    np.testing.assert_allclose(
        jax.jit(partial(einsum, "...D,KHD->...KH"))(x, spread), jnp.einsum("bd,nhd->bnh", x, kernel), atol=1e-4
    )


CHANGES: dict[str, dict[str, Any]] = {
    "float": {},
    "tied": {"tied": True},
    "int8": {"weights": "int8"},
    "bias and norms": {"query_bias": True, "output_bias": True, "feed_forward_bias": True, "query_norm": True},
    "adapter": {"lora_rank": 2, "new_tokens": (57, 58)},
}


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_gives_the_same_logits_over_a_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, random = replace(BASE, **CHANGES[name]), np.random.default_rng(0)
    shapes = nn.meta.unbox(abstract_parameters(Transformer(config)))
    params = jax.tree.map(lambda leaf: jnp.asarray(random.standard_normal(leaf.shape) * 0.3, leaf.dtype), shapes)
    tokens, order = np.array([BLOCK]), np.arange(20)[None]
    ours = fed(config, tokens, order, [5, 15], params)
    monkeypatch.setattr(cpu, "PLAIN", True)
    np.testing.assert_allclose(ours, fed(config, tokens, order, [5, 15], params), atol=1e-4)


Shape = tuple[int, ...]


def compiled(program: Callable[..., Any], *inputs: jax.Array) -> tuple[list[Shape], list[tuple[Shape, ...]]]:
    """Shapes that a compiled program transposes, and those of the operands of each product."""
    text = jax.jit(program).lower(*inputs).compile().as_text()
    shape = {name: tuple(map(int, sizes.split(","))) for name, sizes in re.findall(r"%(\S+) = \w+\[([\d,]+)\]", text)}
    products = re.findall(r" dot\(%(\S+), %(\S+)\)", text)
    transposed = re.findall(r"%(\S+) = \S+ transpose\(", text)
    return [shape[name] for name in transposed], [tuple(shape[name] for name in names) for names in products]


@pytest.mark.parametrize(("rows", "sizes", "features"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_kernel_is_never_transposed(rows: tuple[int, ...], sizes: tuple[int, ...], features: tuple[int, ...]) -> None:
    """Check that no kernel is transposed or, as a right operand, repacked: this copies the weights in every step."""
    kernel = numbers(*features, *sizes)
    transposed, products = compiled(
        partial(einsum, equation_of(len(sizes), len(features))), numbers(*rows, *sizes), kernel
    )
    assert kernel.size not in map(prod, transposed)
    if prod(rows) > 1:
        assert products == [((prod(features), prod(sizes)), (prod(sizes), prod(rows)))]


def test_plain_forms_transpose_what_theirs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where XLA stops transposing these, the forms for CPU can go."""
    ours, plain = both_ways(partial(einsum, "...D,KPHD->...KPH"), monkeypatch)
    x, kernel = numbers(5, 96), numbers(2, 6, 16, 96)
    of_ours, of_plain = (compiled(run, x, kernel)[0] for run in (ours, plain))
    assert kernel.size in map(prod, of_plain) and kernel.size not in map(prod, of_ours)


def test_what_layers_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where XLA keeps to `optimization_barrier`, `materialise` can go."""

    def layers(x: jax.Array, kernel: jax.Array, always: jax.Array) -> jax.Array:
        (sine,) = materialise((jnp.sin(x),), always)
        for _ in range(4):
            x = (x * sine) @ kernel
        return x

    x, kernel, always = numbers(5, 32), numbers(32, 32), jnp.bool_(True)
    sines = []
    for run in both_ways(layers, monkeypatch):
        text = run.lower(x, kernel, always).compile().as_text()
        sines.append(text.count(" sine("))
        expected = np.asarray(x, np.float64)
        for _ in range(4):
            expected = (expected * np.sin(x)) @ np.asarray(kernel, np.float64)
        np.testing.assert_allclose(run(x, kernel, always), expected, rtol=1e-3, atol=1e-2)
    assert sines == [1, 4]


def test_other_platforms_get_the_plain_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 96), (2, 6, 16, 96))]

    def lowered(run: Any, platform: str) -> tuple[int, int]:
        """What a program is made of."""
        text = jax.export.export(run, platforms=[platform])(*shapes).mlir_module()
        return text.count("dot_general"), text.count("reshape ")

    ours, plain = both_ways(partial(einsum, "...D,KPHD->...KPH"), monkeypatch)
    assert lowered(ours, "cuda") == lowered(plain, "cuda")
    assert lowered(ours, "cpu") != lowered(plain, "cpu")
