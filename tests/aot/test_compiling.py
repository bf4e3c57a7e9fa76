"""Ahead-of-time compilation with this machine's CPU as the target instead of an accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from aspd_jax.model.config import ModelConfig
from aspd_jax.shapes import SHAPES
from aspd_jax.sharding import make_mesh
from tests.aot.__main__ import main
from tests.aot.abstract import abstract_model, configuration
from tests.aot.decode import compile_decode_step
from tests.aot.report import compile_for
from tests.aot.topology import Chip, Topology

CHIP = Chip("cpu", 1e9, 1e9, 1e12, 1)
TINY = ModelConfig(vocab_size=64, hidden_size=32, feed_forward=48, layers=1, heads=8, kv_heads=8, head_dim=8)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Topology:
    """A topology of whatever name: this machine."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    on = Topology("here", CHIP, tuple(jax.devices()))
    monkeypatch.setattr("tests.aot.topology.open_topology", lambda name: on)
    return on


@pytest.mark.further
def test_needed_bytes_are_weights_and_cache(here: Topology) -> None:
    """Check the bytes of a whole model, and of one of eight shards, which includes all norms."""
    config = configuration(None, "tiny", "float32", "float", "decode")
    whole = compile_decode_step(abstract_model(config, here, None), here, 1, 1, 128).program
    c = config
    weights = c.hidden_size * (4 * c.heads * c.head_dim + 3 * c.feed_forward + c.vocab_size + 3)
    assert whole.needed == 4 * (weights + 2 * 128 * c.kv_heads * c.head_dim)
    assert whole.fits and whole.traffic is not None and whole.traffic >= whole.needed
    assert whole.memory is not None and whole.memory.arguments >= whole.needed
    assert whole.milliseconds == max(whole.needed / CHIP.bandwidth, whole.flops / CHIP.flops) * 1000
    split = compile_decode_step(
        abstract_model(config, here, make_mesh({"tensor": 8}, here.devices)), here, 1, 1, 128
    ).program
    norms, padding = 4 * 3 * c.hidden_size, 4 * (-c.vocab_size % 1024) * c.hidden_size
    assert padding and split.needed - norms == (whole.needed - norms + padding) // 8


def test_what_does_not_fit_says_by_how_much(here: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        """A program that the compiler of a TPU refuses."""

        jaxpr = jax.make_jaxpr(lambda x: x)(1.0)

        def lower(self, lowering_platforms: Any) -> Any:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.95G of 15.75G hbm. Exceeded …"
            )

    found = compile_for(Refused(), here, 1)
    assert not found.fits and round(found.spare / 2**30, 2) == -6.2 and found.memory is None
    assert found.fit == "no, 6.20 missing"


@pytest.mark.further
def test_the_commands(here: Topology, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "decode.json"
    words = "decode --topology v6e:1x1 --shape tiny --widths 1 --slots 128 --mesh tensor=8"
    assert main([*words.split(), "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.count("computed from the compiled program, not measured") == 1 and "| 128 | 1 | 1 | yes, " in said
    record = json.loads(file.read_text())
    assert [one["width"] for one in record["steps"]] == [1] and "not measured" in record["figures"]
    assert record["steps"][0]["program"]["memory"]["aliased"] > 0
    file = tmp_path / "train.json"
    config = str(tmp_path / "config.yaml")
    Path(config).write_text("model: {checkpoint: none, hidden_size: 64}\ndata: {train: [none]}\nsteps: 4\n")
    changes = [
        "mesh.fsdp=8",
        "data.rows=8",
        "data.length=64",
        "model.layers=1",
        "model.scan=true",
    ]
    assert main(["train", config, *changes, "--topology", "v5p:2x2x2", "--json", str(file)]) == 0
    assert "not measured" in capsys.readouterr().out
    step = json.loads(file.read_text())["step"]
    assert step["fits"] and step["needed"] > 0


def test_mistakes_are_one_line(capsys: Any) -> None:
    for words, said in (
        ("decode --topology v9:1x1", "unknown topology 'v9:1x1'"),
        ("decode --topology v6e:1x1 --widths 0", "--widths: expected at least 1"),
    ):
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_another_checkpoint_that_does_not_exist_is_not_planned(here: Topology, capsys: Any) -> None:
    words = ["configs/lora_7b.yaml", "model.checkpoint=no/such/model", "--topology", "v5e:2x4"]
    assert main(["train", *words]) == 2
    assert "no/such/model: expected a Hugging Face folder" in capsys.readouterr().err
