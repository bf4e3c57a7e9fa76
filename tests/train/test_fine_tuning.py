"""Fine-tuning of checkpoints on records in files, with adapters and without."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

import train.loop
from aspd_jax import LanguageModel, build_layout, load_model
from aspd_jax.errors import ConfigError, DataError
from aspd_jax.language_model import save_adapter, save_model
from aspd_jax.sharding import make_mesh
from infer import Engine, SamplingParams
from tests.conftest import with_one_program
from tests.helpers.training import changed, losses, on_records, prepared
from train.batches import Batch
from train.checkpoints import Checkpoints
from train.config import TrainConfig
from train.loop import export
from train.loop import train as run_training
from train.setup import Setup, load
from train.step import evaluation_sums


@pytest.fixture(scope="module")
def fine_tuning(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Fine-tuning of a small checkpoint on records in files."""
    return on_records(tmp_path_factory.mktemp("fine"))


def test_fine_tuning_on_records(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    run_training(changed(fine_tuning, keep=1), tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(held_out) == 3 and held_out[-1] < held_out[0]
    parts = {"loss_serial", "loss_title", "loss_branch", "tokens_per_second", "gradient_norm"}
    assert parts <= lines[0].keys()
    assert (tmp_path / "run" / "left_out.jsonl").read_text() == ""
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps == [6]
    assert load_model(tmp_path / "run" / "model").config.vocab_size == 768


def leads_file(folder: Path) -> Path:
    """Write records whose titles are leads."""
    rows = []
    for number in range(12):
        parts = [f"\n{n}. {word}:" for n, word in enumerate(("One", "Two", "Three"), 1)]
        branches = [{"title": lead, "text": f"{lead} {'go on ' * (number + 1)}"} for lead in parts]
        structure = [{"type": "serial", "text": "So:"}, {"type": "parallel", "branches": branches}]
        rows.append({"messages": [{"role": "user", "content": f"What {number}?"}], "structure": structure})
    file = folder / "leads.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.further
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("rank", [0, 4])
def test_titles_are_stored_with_what_was_trained(rank: int, fine_tuning: TrainConfig, tmp_path: Path) -> None:
    file = str(leads_file(tmp_path))
    leads = changed(fine_tuning, model__titles="leads", data__train=(file,), data__held_out=(), evaluate_batches=0)
    run_training(changed(leads, steps=2, model__lora_rank=rank), tmp_path / "run", progress=False)
    base = leads.model.checkpoint
    if rank:
        assert load_model(base, adapter=tmp_path / "run" / "adapter").config.titles == "leads"
        export(tmp_path / "run", tmp_path / "merged")
    folder = tmp_path / "merged" if rank else tmp_path / "run" / "model"
    assert load_model(folder).config.titles == "leads" and load_model(base).config.titles == "names"
    lm = load_model(folder)
    engine = with_one_program(Engine(lm, max_length=256, max_batch=1))
    start = lm.codec.special.title_start
    assert engine.config.form.leads
    result = engine.generate(["So:"], SamplingParams(max_new_tokens=200, script=[[start]]))[0]
    assert result.stats.blocks == 0 or result.text.startswith(result.structure[0].branches[0].title)  # type: ignore[union-attr]


def test_other_titles_than_those_of_the_records_are_refused(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    file = leads_file(tmp_path)
    file.write_text(file.read_text().replace('"title": "\\n1. One:"', '"title": "One"'))
    config = changed(fine_tuning, model__titles="leads", data__train=(str(file),), data__strict=True)
    with pytest.raises(DataError, match=r"leads.jsonl, line 1: .* begins with its title 'One'"):
        run_training(config, tmp_path / "run", progress=False)


@pytest.mark.further
def test_epochs_end_by_themselves(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    plain = changed(fine_tuning, steps=0, epochs=1, data__held_out=(), evaluate_batches=0)
    run_training(plain, tmp_path / "run", progress=False)
    once = len(losses(tmp_path / "run"))
    run_training(changed(plain, epochs=3), tmp_path / "more", progress=False)
    assert 2 * once < len(losses(tmp_path / "more")) <= 3 * once + 3


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("weights", ["float", "int8"])
def test_adapters(weights: Any, fine_tuning: TrainConfig, tmp_path: Path) -> None:
    config = changed(fine_tuning, model__lora_rank=4, model__weights=weights, model__scan=weights == "int8")
    setup = prepared(config)
    trained = {path[-1] for path in flatten_dict(setup.state.params)}
    assert {"lora_down", "lora_up", "embedding"} <= trained and "scale" not in trained
    run_training(config, tmp_path / "run", progress=False)
    after = losses(tmp_path / "run")
    assert after[-1] < after[0]
    assert not (tmp_path / "run" / "model").exists()
    base = load_model(config.model.checkpoint)
    tuned = load_model(config.model.checkpoint, adapter=tmp_path / "run" / "adapter")
    kernels = [np.asarray(lm.params["layer_0"]["feed_forward"]["down"]["kernel"]) - 0 for lm in (base, tuned)]
    difference = kernels[1] - kernels[0]
    if weights == "float":
        assert np.linalg.matrix_rank(difference, tol=1e-4) == 4
    assert np.abs(difference).max() > 1e-4
    np.testing.assert_array_equal(base.params["norm"]["scale"], tuned.params["norm"]["scale"])
    assert base.special_tokens is not None
    for of in (("embedding", "embedding"), ("head", "kernel")):
        changed_rows = (flatten_dict(base.params)[of] != flatten_dict(tuned.params)[of]).any(axis=1)
        assert set(np.flatnonzero(changed_rows).tolist()) == set(base.special_tokens.ids)
    merged = tmp_path / "merged"
    export(tmp_path / "run", merged)
    exported = flatten_dict(load_model(merged).params)
    for path, leaf in flatten_dict(tuned.params).items():
        np.testing.assert_allclose(exported[path], leaf, atol=2e-2)  # the adapter is kept in bfloat16


@pytest.mark.further
@pytest.mark.parametrize("scan", [False, True])
def test_draft_heads(scan: bool, fine_tuning: TrainConfig, tmp_path: Path) -> None:
    """Check that only heads are trained, with the loss of a full pass, and that a resumed run is equal."""
    config = changed(fine_tuning, draft__heads=2, model__scan=scan, optimiser__learning_rate=3e-3, steps=6)
    setup = prepared(config)
    assert {path[0] for path in flatten_dict(setup.state.params)} == {"draft_heads"}
    (batch, *_), first = setup_batches(config, setup, tmp_path)
    lm = setup.language_model(setup.state)
    run = {"params": lm.params}
    hidden = lm.model.apply(run, batch.tokens, batch.layout, head=False)
    states = lm.model.apply(run, hidden, batch.tokens, method="draft_states")
    total, targets = 0.0, 0
    for depth, state in enumerate(states, 1):
        logits = np.asarray(lm.model.apply(run, state, method="logits"), np.float64)
        for row, place in np.ndindex(batch.tokens.shape):
            ahead = slice(place + 1, place + depth + 2)
            if batch.loss[row, ahead].shape == (depth + 1,) and batch.loss[row, ahead].all():
                scores = logits[row, place]
                total += np.log(np.exp(scores).sum()) - scores[batch.tokens[row, place + depth + 1]]
                targets += 1
    assert targets > 50 and first == pytest.approx(total / targets, rel=1e-4)

    run_training(config, tmp_path / "run", progress=False)
    after = losses(tmp_path / "run")
    assert after[-1] < after[0] == pytest.approx(first, rel=1e-5)
    whole = load_file(tmp_path / "run" / "draft_heads.safetensors")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for step in (tmp_path / "again" / "checkpoints").iterdir():
        if step.name == "6":
            shutil.rmtree(step)
    (tmp_path / "again" / "draft_heads.safetensors").unlink()
    run_training(config, tmp_path / "again", progress=False)
    for name, tensor in load_file(tmp_path / "again" / "draft_heads.safetensors").items():
        np.testing.assert_array_equal(tensor, whole[name])

    folder = tmp_path / "model"
    shutil.copytree(config.model.checkpoint, folder)
    shutil.copy(tmp_path / "run" / "draft_heads.safetensors", folder)
    trained, base = load_model(folder), load_model(config.model.checkpoint)
    for path, leaf in flatten_dict(base.params).items():
        np.testing.assert_array_equal(leaf, flatten_dict(trained.params)[path])
    prompts, params = ["One and", "What is"], SamplingParams(max_new_tokens=20)
    plain = with_one_program(Engine(base, max_length=128, max_batch=1)).generate(prompts, params)
    drafted = with_one_program(Engine(trained, max_length=128, max_batch=1, drafts="heads")).generate(prompts, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.drafted_tokens for r in drafted)


def setup_batches(config: TrainConfig, setup: Setup, folder: Path) -> tuple[list[Batch], float]:
    """The first batch, and its loss."""
    data = train.loop.read_data(config, setup.lm, folder, False)
    batch = next(data.batches)
    sums = evaluation_sums(setup.state.params, setup.frozen, setup.place(batch), setup.model)
    return [batch], float(sums.mean())


def test_a_model_is_tagged_by_training_with_tags_only(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    save_model(replace(load_model(fine_tuning.model.checkpoint), tagged=False), tmp_path / "ordinary")
    for tagged, folder in ((True, fine_tuning.model.checkpoint), (False, str(tmp_path / "ordinary"))):
        config = changed(fine_tuning, model__checkpoint=folder, model__lora_rank=2)
        assert load_model(folder).tagged == tagged
        heads = changed(config, model__lora_rank=0, draft__heads=1)
        others = {"model__positions": "max", "model__siblings": "shared", "model__titles": "leads"}
        drafted = load(changed(heads, **others), make_mesh({}))
        own = (drafted.config.positions, drafted.config.siblings, drafted.config.titles)
        assert drafted.tagged == tagged and own == ("sequential", "invisible", "names")
        assert load(changed(config, **others), make_mesh({})).config.positions == "max", "negative control"
        for structured in (True, False):
            setup, output = prepared(changed(config, data__structured=structured)), tmp_path / f"{tagged}-{structured}"
            save_adapter(setup.language_model(setup.state), output, folder)
            assert load_model(folder, adapter=output).tagged == (tagged or structured)
            (output / "aspd.json").unlink()  # as of an adapter of another project
            assert load_model(folder, adapter=output).tagged == tagged


def test_no_adapter_is_trained_on_a_checkpoint_that_has_one(fine_tuning: TrainConfig) -> None:
    adapted = changed(fine_tuning, model__checkpoint="smollm2-aspd", model__lora_rank=4)
    with pytest.raises(ConfigError, match=r"got smollm2-aspd. Run `aspd convert smollm2-aspd --output DIR`, and name"):
        load(adapted, make_mesh({}))
    assert load(changed(fine_tuning, model__lora_rank=4), make_mesh({})).config.lora_rank, "negative control"


def test_fresh_adapters_change_nothing_and_int8_little(fine_tuning: TrainConfig) -> None:
    folder = fine_tuning.model.checkpoint
    tokens = np.arange(1, 40)[None] % 700

    def logits(lm: LanguageModel) -> Any:
        layout = build_layout(tokens, lm.special_tokens)
        return np.asarray(lm.model.apply({"params": lm.params}, tokens, layout))

    plain = logits(load_model(folder))
    np.testing.assert_allclose(logits(load_model(folder, lora_rank=4)), plain, atol=1e-6)
    rounded = logits(load_model(folder, weights="int8"))
    error = np.abs(rounded - plain).max()
    assert 1e-6 < error < 0.05 * np.abs(plain).max()


def test_fields_of_fine_tuning_change_the_batches(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    lm = load_model(fine_tuning.model.checkpoint)

    def first(config: TrainConfig, name: str) -> Any:
        batches = train.loop.read_data(config, lm, tmp_path / name, False).batches
        (tmp_path / name).mkdir(exist_ok=True)
        return next(batches)

    for name in ("plain", "bins", "template"):
        (tmp_path / name).mkdir()
    plain = first(fine_tuning, "plain")
    assert (tmp_path / "plain" / "tokenised").exists()
    bins = first(changed(fine_tuning, data__bins=1, data__cache=str(tmp_path / "cache")), "bins")
    assert not np.array_equal(plain.tokens, bins.tokens)
    assert (tmp_path / "cache").exists() and not (tmp_path / "bins" / "tokenised").exists()


def test_a_chat_template_of_ones_own(fine_tuning: TrainConfig, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (tmp_path / "template.jinja").write_text(template)
    config = changed(fine_tuning, data__chat_template=str(tmp_path / "template.jinja"))
    lm = load(config, make_mesh({}))
    assert lm.tokenizer.chat_template == template
