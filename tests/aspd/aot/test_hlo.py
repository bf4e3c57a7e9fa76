"""The parser of compiled programs, on programs written by hand and on small ones compiled for this machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd.aot.aot_report import count_collectives, product_flops, step_loop
from aspd.aot.hlo import Array, Program, cheapest, dearest, parse
from aspd.aot.topology import open_topology
from aspd_jax.errors import ConfigError
from aspd_jax.sharding import make_mesh, named_sharding

BY_HAND = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->()}

%update (cache: bf16[64,128], new: bf16[1,128], at: s32[]) -> bf16[64,128] {
  %cache = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %new = bf16[1,128]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = bf16[64,128]{1,0} dynamic-update-slice(%cache, %new, %at, %zero)
}

%view (k: bf16[64,128]) -> bf16[64,128] {
  %k = bf16[64,128]{1,0} parameter(0)
  ROOT %same = bf16[64,128]{1,0} bitcast(%k)
}

%product (kernel: bf16[64,128], x: bf16[128]) -> bf16[64] {
  %kernel = bf16[64,128]{1,0} parameter(0)
  %x = bf16[128]{0} parameter(1)
  %seen = bf16[64,128]{1,0} fusion(%kernel), kind=kLoop, calls=%view
  ROOT %y = bf16[64]{0} dot(%seen, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%row (table: bf16[64,128], at: s32[]) -> bf16[1,128] {
  %table = bf16[64,128]{1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %nought = s32[] constant(0)
  ROOT %taken = bf16[1,128]{1,0} dynamic-slice(%table, %at.1, %nought), dynamic_slice_sizes={1,128}
}

%little (l: f32[8]) -> f32[8] {
  ROOT %l = f32[8]{0} parameter(0)
}

%much (m: f32[8]) -> f32[8] {
  %m = f32[8]{0} parameter(0)
  ROOT %twice = f32[8]{0} add(%m, %m)
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

ENTRY %main (a: bf16[64,128], b: bf16[1,128], c: s32[], x: bf16[128], f: f32[8], p: pred[]) -> f32[8] {
  %a = bf16[64,128]{1,0} parameter(0), metadata={op_name="a"}
  %b = bf16[1,128]{1,0} parameter(1)
  %c = s32[] parameter(2)
  %v = bf16[128]{0:S(1)} parameter(3)
  %f = f32[8]{0} parameter(4)
  %p = pred[] parameter(5)
  %updated = bf16[64,128]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%update
  %multiplied = bf16[64]{0:S(1)} fusion(%updated, %v), kind=kOutput, calls=%product
  %one = bf16[1,128]{1,0:S(1)} fusion(%updated, %c), kind=kLoop, calls=%row
  %start = (s32[], bf16[64,128]{1,0}) tuple(%c, %updated)
  %loop = (s32[], bf16[64,128]{1,0}) while(%start), condition=%test, body=%body, metadata={op_name="jit(f)/while"}
  ROOT %chosen = f32[8]{0} conditional(%p, %f, %f), true_computation=%little, false_computation=%much
}
"""


def test_a_program_by_hand() -> None:
    """Check an update in place, a kernel read through a view, a row of a table, and a copy to fast memory in a loop."""
    program = parse(BY_HAND)
    least, most = program.region(cheapest), program.region(dearest)
    whole, row = 64 * 128 * 2, 128 * 2
    updated = row + 4 + row  # the new row and its place read, the row written
    assert least.bytes == updated + whole + (row + 4)
    assert most.bytes - least.bytes == 3 * 32  # twice read, once written
    (loop,) = least.loops
    assert (loop.source, loop.trips, loop.bytes) == ("jit(f)/while", 5, whole)
    assert least.total == least.bytes + 5 * whole
    (said,) = count_collectives(least)
    assert (said.loop, said.kind, said.array, said.times) == ("jit(f)/while", "all-reduce", "bf16[64,128]", 5)
    assert said.bytes == 5 * whole


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
    """Check that an asynchronous collective in a loop counts once, without HBM traffic of its own."""
    region = parse(IN_STEPS).region(cheapest)
    (said,) = count_collectives(region)
    assert (said.loop, said.times, said.bytes, region.total) == ("", 1, 64 * 128 * 2, 0)
    # Negative control: without what marks the steps there are seven collectives.
    whole = parse(IN_STEPS.replace('frontend_attributes={chain_id="0"}', "x={}")).region(cheapest)
    assert sum(one.times for one in count_collectives(whole)) == 7 and whole.total > 0


def test_arrays() -> None:
    assert Array("pred", (3,), 0).bytes == 3 and Array("s4", (3,), 0).bytes == 2
    assert Array("bf16", (), 0).bytes == 2 and Array("f8e4m3fn", (2, 2), 1).bytes == 4
    assert Array("f32", (2,), 1).hbm == 0 and str(Array("f32", (2, 3), 0)) == "f32[2,3]"


def compiled(function: object, *arguments: object) -> Program:
    """A small program of this machine."""
    return parse(jax.jit(function).lower(*arguments).compile().as_text())  # type: ignore[arg-type]


def test_a_loop_reads_its_kernel_every_time() -> None:
    kernel = jnp.ones((256, 256))

    def loop(kernel: jax.Array, x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.tanh(kernel @ s[1])), (0, x))[1]

    region = compiled(loop, kernel, jnp.ones(256), 7).region(cheapest)
    one = step_loop(region)
    assert one.trips is None and kernel.nbytes <= one.total <= 1.1 * kernel.nbytes
    assert region.total - one.total < 0.1 * kernel.nbytes

    def transposing(kernel: jax.Array, x: jax.Array, n: jax.Array) -> jax.Array:
        return loop(jax.lax.optimization_barrier(kernel.T + 1), x, n)

    region = compiled(transposing, kernel, jnp.ones(256), 7).region(cheapest)  # negative control
    assert region.total - step_loop(region).total >= 2 * kernel.nbytes


def test_trips_multiply() -> None:
    region = compiled(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sin(x) @ x, x), jnp.ones((64, 64))).region(
        dearest
    )
    assert [loop.trips for loop in region.loops] == [9]
    assert region.total >= 9 * 3 * 64 * 64 * 4


def test_collectives_of_a_mesh() -> None:
    mesh = make_mesh({"tensor": 8})
    kernel = jax.device_put(np.ones((64, 32), np.float32), named_sharding(("heads", "embed"), (64, 32), mesh))
    said = count_collectives(compiled(lambda kernel: jnp.ones((4, 64)) @ kernel, kernel).region(cheapest))
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
    monkeypatch.setattr("aspd.aot.topology.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=f"pip install .*{package}") as caught:
        open_topology(name)
    assert "\n" not in str(caught.value)
