"""The loss over a mesh equals that of one device, and the head is communicated once, not per chunk."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import train.loss
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.vocabulary import HEAD_AXES, Head, lm_head
from aspd_jax.sharding import make_mesh, named_sharding
from tests.infer.decode.test_collectives import collectives
from train.loss import Sums, loss_over_mesh, next_token_loss

ROWS, LENGTH, SIZE, VOCABULARY, PARTS = 8, 24, 16, 40, 3
NEW = (3, 21, 22, 39)  # on several devices where the vocabulary is split
LOOP = re.compile(r"\bbody=%?([\w.\-]+)")
CALLED = re.compile(r"\b(?:body|condition|calls|to_apply)=%?([\w.\-]+)")

pytestmark = pytest.mark.several


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.loss, "CHUNK", 8)


def arguments(vocabulary: int, new: tuple[int, ...], mesh: Mesh | None) -> tuple[Any, ...]:
    """Hidden, head and what the loss knows of the tokens, where a training step has them."""
    random = np.random.default_rng(0)

    def placed(array: np.ndarray, *axes: str) -> jax.Array:
        return jax.device_put(array, None if mesh is None else named_sharding(axes, array.shape, mesh))

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    def integers(below: int) -> np.ndarray:
        return random.integers(0, below, (ROWS, LENGTH), np.int32)

    hidden = placed(normal(ROWS, LENGTH, SIZE), "batch", "sequence", "norm")
    kernel, own = normal(vocabulary, SIZE), normal(len(new), SIZE)
    head = Head(placed(kernel, *HEAD_AXES.kernel), placed(own, *HEAD_AXES.new_tokens) if new else None)
    of_tokens = integers(vocabulary), integers(3).astype(np.float32), integers(PARTS)
    return hidden, head, *(placed(array, "batch", "sequence") for array in of_tokens)


def loss(new: tuple[int, ...], mesh: Mesh | None, padding: int = 0) -> Any:
    """Loss and its gradients by hidden and head, of `arguments`: a function that compiles it for them."""
    shape = ModelConfig(
        VOCABULARY,
        SIZE,
        feed_forward=1,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        new_tokens=new,
        vocab_padding=padding,
    )
    logits = partial(lm_head, shape)

    def total(hidden: jax.Array, head: Head, *of_tokens: jax.Array) -> tuple[jax.Array, Sums]:
        if mesh is None:
            sums = next_token_loss(hidden, partial(logits, head), *of_tokens, PARTS)
        else:
            sums = loss_over_mesh(mesh, hidden, head, logits, *of_tokens, PARTS)
        return sums.mean(), sums

    def compiled(hidden: jax.Array, head: Head, *of_tokens: jax.Array) -> Any:
        places = jax.tree.map(lambda leaf: leaf.sharding, (hidden, head))
        step = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), out_shardings=(None, places))
        return step.lower(hidden, head, *of_tokens).compile()

    return compiled


MESHES = [{"fsdp": 8}, {"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("new", [(), NEW], ids=["whole", "new tokens"])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY + 1], ids=["split", "indivisible"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_loss_and_gradients_are_those_of_one_device(
    sizes: dict[str, int], vocabulary: int, new: tuple[int, ...]
) -> None:
    mesh = make_mesh(sizes)
    one, many = (arguments(vocabulary, new, over) for over in (None, mesh))
    expected = loss(new, None)(*one)(*one)
    got = loss(new, mesh)(*many)(*many)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, expected)
    assert float(jnp.abs(expected[1][1].kernel).max()) > 1e-3
    split = sizes.get("tensor", 1) if vocabulary % sizes.get("tensor", 1) == 0 else 1
    assert got[1][1].kernel.sharding.shard_shape((vocabulary, SIZE)) == (
        vocabulary // split,
        SIZE // sizes.get("fsdp", 1),
    )


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("new", [(), NEW], ids=["whole", "new tokens"])
def test_padding_adds_nothing_to_the_loss(new: tuple[int, ...]) -> None:
    """Check a vocabulary padded from 40 to 48 for eight devices against 40 on one."""
    hidden, head, *of_tokens = arguments(VOCABULARY, new, None)
    expected = loss(new, None)(hidden, head, *of_tokens)(hidden, head, *of_tokens)
    mesh, rows = make_mesh({"tensor": 8}), 100 * np.ones((8, SIZE), np.float32)
    place = partial(named_sharding, mesh=mesh)
    many = jax.device_put(hidden, place(("batch", "sequence", "norm"), hidden.shape))
    of_tokens = [jax.device_put(array, place(("batch", "sequence"), array.shape)) for array in of_tokens]
    kernel = jnp.concatenate([head.kernel, rows])
    own = jax.device_put(head.new_tokens, place(HEAD_AXES.new_tokens, head.new_tokens.shape)) if new else None
    split = Head(jax.device_put(kernel, place(HEAD_AXES.kernel, kernel.shape)), own)
    got = loss(new, mesh, padding=8)(many, split, *of_tokens)(many, split, *of_tokens)
    gradient = got[1][1].kernel
    assert gradient.sharding.shard_shape(gradient.shape) == (6, SIZE)
    assert not np.asarray(gradient[VOCABULARY:]).any()
    got = (got[0], (got[1][0], got[1][1]._replace(kernel=gradient[:VOCABULARY])))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, expected)
    # Negative control: these rows count where nothing says that they are no tokens.
    assert float(loss(new, mesh)(many, split, *of_tokens)(many, split, *of_tokens)[0][0]) > 2 * float(expected[0][0])


def in_loops(program: str) -> str:
    """All computations that run in loops."""
    texts = {name[1]: text for text in program.split("\n\n") if (name := re.match(r"%?([\w.\-]+) \(", text))}
    reached: set[str] = set()
    todo = LOOP.findall(program)
    assert todo
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += CALLED.findall(texts[name])
    return "\n".join(texts[name] for name in sorted(reached))


def of_head(program: str, tensor: int) -> list[str]:
    """Collectives on arrays that are as large as a device's share of the vocabulary, in one way or the other."""
    return [shape for shape in collectives(program) if re.search(rf"\b{VOCABULARY // tensor}\b", shape)]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_no_collective_on_the_head_in_the_loop(sizes: dict[str, int]) -> None:
    mesh, tensor = make_mesh(sizes), sizes.get("tensor", 1)
    many = arguments(VOCABULARY, (), mesh)
    program = loss((), mesh)(*many).as_text()
    assert not of_head(in_loops(program), tensor)
    if "fsdp" in sizes:
        assert program.count(" all-gather(") == 1, "it is gathered, once"
        # Negative control: the same loss, with what its devices say left to the compiler.
        assert of_head(in_loops(loss((), None)(*many).as_text()), tensor)
