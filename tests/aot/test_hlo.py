"""Reading compiled programs: programs written by hand, and small ones compiled for this machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd_jax.errors import ConfigError
from aspd_jax.sharding import make_mesh, named_sharding
from tests.aot.report import product_flops
from tests.aot.topology import open_topology
from tests.helpers.hlo import Array, count_collectives, instructions

BY_HAND = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->()}

%little (l: f32[8]) -> f32[8] {
  ROOT %l = f32[8]{0} parameter(0)
}

%much (m: f32[8]) -> f32[8] {
  %m = f32[8]{0} parameter(0)
  ROOT %twice = f32[8]{0} sort(%m), dimensions={0}
}

%inside (k: bf16[64,128]) -> bf16[64,128] {
  %k = bf16[64,128]{1,0} parameter(0)
  ROOT %same = bf16[64,128]{1,0} copy(%k)
}

%test (state: (s32[], bf16[64,128])) -> pred[] {
  %state = (s32[], bf16[64,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %most = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}

%body (carry: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %carry = (s32[], bf16[64,128]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %w = bf16[64,128]{1,0} get-tuple-element(%carry), index=1
  %fast = (bf16[64,128]{1,0:S(1)}, bf16[64,128]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %there = bf16[64,128]{1,0:S(1)} copy-done(%fast)
  %sum = f32[16,8]{1,0:S(1)} all-reduce(%there), replica_groups={{0,1}}, to_apply=%much, metadata={op_name="said"}
  ROOT %again = (s32[], /*index=1*/bf16[64,128]{1,0}) tuple(%n, %w)
}

ENTRY %main (a: bf16[64,128], c: s32[], f: f32[8], p: pred[]) -> f32[8] {
  %a = bf16[64,128]{1,0} parameter(0), metadata={op_name="a"}
  %c = s32[] parameter(1)
  %f = f32[8]{0} parameter(2)
  %p = pred[] parameter(3)
  %fused = bf16[64,128]{1,0} fusion(%a), kind=kLoop, calls=%inside
  %start = (s32[], bf16[64,128]{1,0}) tuple(%c, %fused)
  %loop = (s32[], bf16[64,128]{1,0}) while(%start), condition=%test, body=%body, metadata={op_name="jit(f)/while"}
  ROOT %chosen = f32[8]{0} conditional(%p, %f, %f), branch_computations={%little, %much}
}
"""


def test_a_program_by_hand() -> None:
    """Check loops, fusions, branches, operands and memory spaces; the larger side of a collective counts."""
    by_opcode: dict[str, list[tuple[str, int, bool, bool]]] = {}
    for one in instructions(BY_HAND):
        by_opcode.setdefault(one.opcode, []).append((one.loop, one.times, one.fused, one.arrays[0].hbm))
    assert by_opcode["copy"] == [("", 1, True, True)]
    assert by_opcode["copy-start"] == [("jit(f)/while", 5, False, False)]
    assert ("", 1, False, True) in by_opcode["sort"], "of a branch"
    (said,) = count_collectives(BY_HAND)
    whole = 64 * 128 * 2
    assert said == ("jit(f)/while", "all-reduce", "bf16[64,128]", 5, 5 * whole)
    annotated = BY_HAND.replace("constant(5)", "parameter(1)")
    assert [one.times for one in count_collectives(annotated)] == [1], "a loop of unknown length"
    known = annotated.replace('"jit(f)/while"}', '"jit(f)/while"}, backend_config={"known_trip_count":{"n":"7"}}')
    assert [one.times for one in count_collectives(known)] == [7]


IN_STEPS = """HloModule jit_g

%step (p: bf16[8,128]) -> bf16[64,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %g = bf16[64,128]{1,0} all-gather(%p), channel_id=7, dimensions={0}, frontend_attributes={chain_id="0"}
}

%next (q: bf16[8,128]) -> bf16[64,128] {
  %q = bf16[8,128]{1,0} parameter(0)
  ROOT %h = bf16[64,128]{1,0} all-gather(%q), channel_id=7, dimensions={0}, frontend_attributes={chain_id="0"}
}

%test (s: (s32[], bf16[8,128])) -> pred[] {
  %s = (s32[], bf16[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %most = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}

%body (t: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %t = (s32[], bf16[8,128]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %k = bf16[8,128]{1,0} get-tuple-element(%t), index=1
  %on = bf16[64,128]{1,0} fusion(%k), kind=kCustom, calls=%next
  ROOT %again = (s32[], bf16[8,128]{1,0}) tuple(%n, %k)
}

ENTRY %main (a: bf16[8,128], c: s32[]) -> bf16[64,128] {
  %a = bf16[8,128]{1,0} parameter(0)
  %c = s32[] parameter(1)
  %begun = bf16[64,128]{1,0} fusion(%a), kind=kCustom, calls=%step
  %start = (s32[], bf16[8,128]{1,0}) tuple(%c, %a)
  %loop = (s32[], bf16[8,128]{1,0}) while(%start), condition=%test, body=%body
  ROOT %end = bf16[64,128]{1,0} fusion(%a), kind=kCustom, calls=%step
}
"""


def test_a_collective_in_steps_counts_once() -> None:
    (said,) = count_collectives(IN_STEPS)
    assert (said.loop, said.times, said.bytes) == ("", 1, 64 * 128 * 2)
    # Negative control: without what marks the steps there are seven collectives.
    assert sum(one.times for one in count_collectives(IN_STEPS.replace("chain_id", "x"))) == 7


def test_arrays() -> None:
    assert Array("pred", (3,), True).bytes == 3 and Array("s4", (3,), True).bytes == 2
    assert Array("bf16", (), True).bytes == 2 and Array("f8e4m3fn", (2, 2), True).bytes == 4
    assert str(Array("f32", (2, 3), True)) == "f32[2,3]"


def compiled(function: object, *arguments: object) -> str:
    """A small program of this machine."""
    text: str = jax.jit(function).lower(*arguments).compile().as_text()  # type: ignore[arg-type]
    return text


def test_trips_multiply() -> None:
    text = compiled(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sin(x) @ x, x), jnp.ones((64, 64)))
    assert {one.times for one in instructions(text) if one.opcode in ("sine", "dot", "custom-call")} == {9}


def test_collectives_of_a_mesh() -> None:
    mesh = make_mesh({"tensor": 8})
    kernel = jax.device_put(np.ones((64, 32), np.float32), named_sharding(("heads", "embed"), (64, 32), mesh))
    said = count_collectives(compiled(lambda kernel: jnp.ones((4, 64)) @ kernel, kernel))
    assert [(one.kind, one.array) for one in said] == [("all-reduce", "f32[4,32]")]


def test_flops_of_products() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)

    traced = jax.jit(f).trace(jnp.ones((2, 8)), jnp.ones((8, 8)))
    assert product_flops(traced.jaxpr.jaxpr) == (3 + 2) * 2 * 2 * 8 * 8


@pytest.mark.parametrize("name", ["v9:1x1", "v6e", "v6e:0x1", "v6e:1x1x1", "h100:8"])
def test_unknown_topologies(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown topology '{name}'; expected a name such as v5e:2x4, v6e:1x1"):
        open_topology(name)


@pytest.mark.parametrize("name,package", [("v6e:1x1", "libtpu"), ("h100:1x1x8", "jax-cuda12-plugin")])
def test_missing_packages(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.aot.topology.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=f"pip install .*{package}") as caught:
        open_topology(name)
    assert "\n" not in str(caught.value)
