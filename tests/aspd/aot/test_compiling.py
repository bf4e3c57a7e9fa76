"""`aspd compile` with this machine's CPU as the target instead of an accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

import aspd
from aspd.aot import aot_report
from aspd.aot.abstract import abstract_model, configuration
from aspd.aot.aot_report import Figures, compile_for
from aspd.aot.decode import CompiledStep, compile_decode_step, expected_answer
from aspd.aot.topology import Chip, Topology
from aspd_jax.errors import RequestError
from aspd_jax.model.cache import Bucket
from aspd_jax.model.model_config import ModelConfig
from aspd_jax.shapes import SHAPES
from aspd_jax.sharding import make_mesh
from tests.conftest import ROOT

CHIP = Chip("cpu", 1e9, 1e9, 1e12, 1)
TINY = ModelConfig(vocab_size=64, hidden_size=32, feed_forward=48, layers=1, heads=8, kv_heads=8, head_dim=8)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Topology:
    """A topology of whatever name: this machine."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    on = Topology("here", CHIP, tuple(jax.devices()))
    monkeypatch.setattr("aspd.aot.topology.open_topology", lambda name: on)
    return on


@pytest.mark.parametrize("branches,length,serial,adaptive", [(2, 20, 62, 57), (4, 12, 60, 57), (3, 30, 107, 71)])
def test_expected_steps_are_those_of_the_engine(branches: int, length: int, serial: int, adaptive: int) -> None:
    """Check that steps equal those of `infer.bench.decoding.answer_times`."""

    def steps(width: int, milliseconds: float | None) -> CompiledStep:
        read = Figures(True, 0.0, None, 1, 1, 1, 0, (), 0, 0, 0.0, milliseconds, 0.0)
        return CompiledStep(width, 1, 128, Bucket(1, width, width, 128), read)

    expected = expected_answer([steps(1, 2.0), steps(4, 3.0)], branches, length)
    assert expected is not None and (expected.serial_steps, expected.adaptive_steps) == (serial, adaptive)
    wide = length - 3  # the fork, and all but head and last token
    assert expected.serial_ms == 2 * serial and expected.adaptive_ms == 2 * (adaptive - wide) + 3 * wide
    assert expected_answer([steps(1, 2.0), steps(4, None)], branches, length) is None
    with pytest.raises(RequestError, match="expected 1 and a width of at least 8 for 8 branches"):
        expected_answer([steps(1, 2.0), steps(4, 3.0)], 8, 12)


def test_needed_bytes_are_weights_and_cache(here: Topology) -> None:
    """Check the bytes of a whole model, and of one of eight shards, which includes all norms."""
    config = configuration(None, "tiny", "float32", "float", "decode")
    whole = compile_decode_step(abstract_model(config, here, None), here, 1, 1, 128).figures
    c = config
    weights = c.hidden_size * (4 * c.heads * c.head_dim + 3 * c.feed_forward + c.vocab_size + 3)
    assert whole.needed_bytes == 4 * (weights + 2 * 128 * c.kv_heads * c.head_dim)
    assert whole.fits and whole.memory is not None and whole.bytes is not None and whole.bytes >= whole.needed_bytes
    split = compile_decode_step(
        abstract_model(config, here, make_mesh({"tensor": 8}, here.devices)), here, 1, 1, 128
    ).figures
    norms, padding = 4 * 3 * c.hidden_size, 4 * (-c.vocab_size % 1024) * c.hidden_size
    assert padding and split.needed_bytes - norms == (whole.needed_bytes - norms + padding) // 8
    assert split.needed_collective_bytes == 2 * c.hidden_size * 4 and split.collectives


def test_what_does_not_fit_says_by_how_much(here: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        """A program that the compiler of a TPU refuses."""

        jaxpr = jax.make_jaxpr(lambda x: x)(1.0)

        def lower(self, lowering_platforms: Any) -> Any:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.95G of 15.75G hbm. Exceeded …"
            )

    found = aot_report.figures(compile_for(Refused(), here, 1), True, 0, 0)
    assert not found.fits and round(found.spare / 2**30, 2) == -6.2 and found.bytes is None
    assert aot_report.fit(found) == "no, 6.20 missing"


def test_the_commands(here: Topology, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "decode.json"
    words = "compile decode --topology v6e:1x1 --shape tiny --widths 1 --slots 128 --mesh tensor=8 --answers 1x12"
    assert aspd.main([*words.split(), "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.count("computed from the compiled program, not measured") == 2 and "| 1 branches of 12 |" in said
    record = json.loads(file.read_text())
    assert [one["width"] for one in record["steps"]] == [1] and "not measured" in record["figures"]
    assert record["steps"][0]["figures"]["collectives"][0]["kind"] == "all-reduce"
    assert record["steps"][0]["figures"]["memory"]["aliased"] > 0
    assert record["answers"][0]["speed_up"] > 0
    file = tmp_path / "train.json"
    config = str(ROOT / "configs" / "embedded_aspd.yaml")
    changes = [
        "mesh.fsdp=8",
        "data.rows=8",
        "data.length=64",
        "data.short_steps=0",
        "model.layers=1",
        "model.scan=true",
    ]
    assert aspd.main(["compile", "train", config, *changes, "--topology", "v5p:2x2x2", "--json", str(file)]) == 0
    assert "not measured" in capsys.readouterr().out
    step = json.loads(file.read_text())["step"]
    assert step["fits"] and step["bytes"] > 0 and step["collective_bytes"] > 0 and step["needed_collective_bytes"] > 0


def test_mistakes_are_one_line(capsys: Any) -> None:
    for words, said in (
        ("compile decode --topology v9:1x1", "unknown topology 'v9:1x1'"),
        ("compile decode --topology v6e:1x1 --widths 0", "--widths: expected at least 1"),
        ("compile decode --topology v6e:1x1 --answers 8", "--answers: expected branches x tokens"),
    ):
        assert aspd.main(words.split()) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
