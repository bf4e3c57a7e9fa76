"""Several adapters on one base: every request as if its adapter were merged into a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest

from aspd_jax import LanguageModel, load_model, save_model
from aspd_jax.errors import CheckpointError, RequestError
from aspd_jax.formats.adapter import open_adapter, write_adapter
from aspd_jax.language_model import put_adapter
from aspd_jax.model.adapter import Adapter, Factors, Rows
from infer import Engine, SamplingParams
from infer.answers.logprobs import token_logprobs
from tests.aspd_jax.formats.test_peft_adapters import CASES, base_folder
from tests.conftest import with_one_program
from tests.helpers.serving import Running, ask, serving

RANK = 9


def write(
    base: LanguageModel,
    folder: Path,
    seed: int,
    rank: int,
    shared: bool,
    rows: bool = True,
    scale: float = 0.3,
    **settings: Any,
) -> Path:
    """An adapter with factors of every linear layer; `shared`: of all that read the same, one down."""
    c, random = base.config, np.random.default_rng(seed)
    width = c.heads * c.head_dim
    sizes = {
        "self_attn.q_proj": (c.hidden_size, width),
        "self_attn.k_proj": (c.hidden_size, c.kv_heads * c.head_dim),
        "self_attn.v_proj": (c.hidden_size, c.kv_heads * c.head_dim),
        "self_attn.o_proj": (width, c.hidden_size),
        "mlp.gate_proj": (c.hidden_size, c.feed_forward),
        "mlp.up_proj": (c.hidden_size, c.feed_forward),
        "mlp.down_proj": (c.feed_forward, c.hidden_size),
    }
    factors = {}
    for layer in range(c.layers):
        down = random.standard_normal((rank, c.hidden_size)) * scale
        for name, (inputs, outputs) in sizes.items():
            own = down if shared and inputs == c.hidden_size else random.standard_normal((rank, inputs)) * scale
            up = random.standard_normal((outputs, rank)) * scale
            factors[f"model.layers.{layer}.{name}"] = Factors(own.astype(np.float32), up.astype(np.float32), 2.0)
    tables = ("model.embed_tokens",) if c.tied else ("model.embed_tokens", "lm_head")
    assert base.special_tokens is not None
    ids = base.special_tokens.ids
    own_rows = {t: Rows(ids, (random.standard_normal((6, c.hidden_size)) * scale).astype(np.float32)) for t in tables}
    own_rows = own_rows if rows else {}
    settings = {"positions": c.positions, "siblings": c.siblings} | settings
    write_adapter(Adapter("", factors, own_rows, settings), folder, "tiny", 2.0 * rank, np.float32, base.tokenizer)
    return folder


class Made:
    """A base with two of three slots in use, and the same models merged."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.base = base_folder(folder / "base", config)
        plain = load_model(self.base)
        self.folders = {
            "first": write(plain, folder / "first", 1, RANK, shared=True),
            "second": write(plain, folder / "second", 2, RANK // 3, shared=False),
            "without rows": write(plain, folder / "third", 3, RANK, shared=True, rows=False),
        }
        self.merged = {name: load_model(self.base, adapter=at) for name, at in self.folders.items()} | {"": plain}

    def together(self, **settings: Any) -> Engine:
        engine = Engine(load_model(self.base, adapters=3, lora_rank=RANK), max_batch=4, max_length=128, **settings)
        for name, folder in self.folders.items():
            engine.adapters.put(name, folder)
        return engine

    def alone(self, name: str) -> Engine:
        return with_one_program(Engine(self.merged[name], max_batch=1, max_length=128))


@pytest.fixture(scope="module", params=["untied", "qwen2"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("adapters"), CASES[request.param])


untied = pytest.mark.parametrize("made", ["untied"], indirect=True)
PROMPT = list(range(40, 60))
GREEDY = SamplingParams(max_new_tokens=40, max_branch_tokens=6)
NAMES = ["first", "", "second", "without rows"]


@pytest.mark.further
@pytest.mark.parametrize("made", ["untied", "qwen2", "gemma3"], indirect=True)
def test_a_mixed_batch_is_as_merged_models_are(made: Made) -> None:
    found = made.together().generate([PROMPT] * 4, GREEDY, adapter=NAMES)
    alone = [made.alone(name).generate([PROMPT], GREEDY)[0] for name in NAMES]
    assert [result.token_ids for result in found] == [result.token_ids for result in alone]
    assert len({tuple(result.token_ids) for result in found}) == 4  # or nothing is shown


@pytest.mark.further
def test_full_passes_too(made: Made) -> None:
    engine = made.together()
    for name, result in zip(NAMES, engine.generate([PROMPT] * 4, GREEDY, adapter=NAMES), strict=True):
        at = engine.adapters.slot(engine.adapters.number(name))
        ours = token_logprobs(engine.lm, engine.config, result, 3, at)
        theirs = token_logprobs(made.merged[name], engine.config, result, 3)
        np.testing.assert_allclose([t.logprob for t in ours], [t.logprob for t in theirs], atol=1e-4)


@pytest.mark.further
@untied
def test_programs_are_those_of_before(made: Made) -> None:
    """Check that no program is compiled again; arrays committed to a device would have their own."""
    lm = load_model(made.base, adapters=3, lora_rank=RANK)
    before = jax.tree.map(lambda leaf: (leaf.committed, leaf.sharding, leaf.aval), lm.params)
    put_adapter(lm, 1, open_adapter(made.folders["first"]))
    assert jax.tree.map(lambda leaf: (leaf.committed, leaf.sharding, leaf.aval), lm.params) == before
    tied = jax.device_put(lm.params, jax.tree.map(lambda leaf: leaf.sharding, lm.params))
    assert jax.tree.map(lambda leaf: (leaf.committed, leaf.sharding, leaf.aval), tied) != before, "negative control"


@pytest.mark.further
@untied
def test_nothing_is_reused_of_another_adapter(made: Made) -> None:
    """Check one prompt with one adapter after another in one row: answers equal those of new engines."""
    engine = with_one_program(Engine(made.together().lm, max_batch=1, max_length=128))
    for name, folder in made.folders.items():
        engine.adapters.put(name, folder)
    long = PROMPT * 3
    for name in [*NAMES, *NAMES]:
        (found,) = engine.generate([long], GREEDY, adapter=name)
        (alone,) = made.alone(name).generate([long], GREEDY)
        assert found.token_ids == alone.token_ids and found.stats.reused_tokens == 0
    (again,) = engine.generate([long], GREEDY, adapter=NAMES[-1])
    assert again.stats.reused_tokens > 0  # of its own


@pytest.mark.further
@untied
def test_places_are_given_away_when_nobody_uses_them(made: Made) -> None:
    engine = made.together()
    with pytest.raises(RequestError, match="adapter slots: expected a free one, got 3 in use"):
        engine.adapters.put("fourth", made.folders["first"])
    handle, checked = engine.submit(PROMPT, GREEDY, adapter="first"), engine.check(PROMPT, GREEDY, adapter="first")
    engine.adapters.remove("first")
    with pytest.raises(RequestError, match="adapter: expected one of 'second', 'without rows', got 'first'"):
        engine.check(PROMPT, GREEDY, adapter="first")
    with pytest.raises(
        RequestError, match="adapter slots: expected a free one, got 3 in use"
    ):  # the request still has it
        engine.adapters.put("first", made.folders["second"])
    expected = made.alone("first").generate([PROMPT], GREEDY)[0].token_ids
    assert handle.wait().token_ids == expected
    engine.adapters.put("first", made.folders["second"])  # a name may come to mean another
    with pytest.raises(RequestError, match="adapter: expected a loaded one, got one that was replaced"):
        engine.submit_checked(checked)
    (now,) = engine.generate([PROMPT], GREEDY, adapter="first")
    assert now.token_ids == engine.generate([PROMPT], GREEDY, adapter="second")[0].token_ids != expected


@pytest.mark.further
@untied
def test_a_place_is_free_whoever_has_none(made: Made) -> None:
    engine = with_one_program(Engine(load_model(made.base, adapters=1, lora_rank=RANK), max_batch=1, max_length=128))
    handle = engine.submit(PROMPT, GREEDY)  # of the base
    engine.adapters.put("first", made.folders["first"])
    assert handle.wait().token_ids == engine.generate([PROMPT], GREEDY)[0].token_ids
    assert engine.generate([PROMPT], GREEDY, adapter="first")[0].token_ids != handle.wait().token_ids


@untied
def test_only_adapters_trained_with_tags_write_them(made: Made, tmp_path: Path) -> None:
    """Check base and adapters: one without settings, as PEFT writes it, leaves a model without tags."""
    engine, plain = made.together(), open_adapter(made.folders["without rows"])
    engine.adapters.remove("second")
    base = made.merged[""]
    write_adapter(replace(plain, settings={}), tmp_path / "plain", "tiny", 2.0 * RANK, np.float32, base.tokenizer)
    engine.adapters.put("plain", tmp_path / "plain")
    assert not base.tagged and made.merged["first"].tagged
    modes = {name: engine.check(PROMPT, GREEDY, adapter=name).mode for name in ("", "first", "plain")}
    assert modes == {"": "serial", "first": "adaptive", "plain": "serial"}


@pytest.mark.further
@untied
def test_bad_adapters_are_named_and_change_nothing(made: Made, tmp_path: Path) -> None:
    engine = made.together()
    engine.adapters.remove("second")
    base = made.merged[""]
    bad = {
        r"expected at most 9 ranks in all, got 10": write(base, tmp_path / "a", 5, 10, shared=True),
        r"expected at most 9 ranks in all, got 18": write(base, tmp_path / "b", 5, RANK, shared=False),
        r"positions: expected 'sequential', got 'max'": write(base, tmp_path / "c", 5, 2, True, positions="max"),
        r"expected an adapter folder": tmp_path / "none",
    }
    before = engine.generate([PROMPT] * 2, GREEDY, adapter=["first", "without rows"])
    for message, folder in bad.items():
        with pytest.raises(CheckpointError, match=message):
            engine.adapters.put("bad", folder)
    other = Adapter("odd", {"model.layers.9.mlp.up_proj": Factors(np.zeros((1, 2)), np.zeros((2, 1)), 1.0)})
    with pytest.raises(CheckpointError, match=r"odd: expected a base with slots for factors of model.layers.9.mlp.up_"):
        put_adapter(engine.lm, 0, other)
    wrong = Adapter("odd", {"model.layers.0.mlp.up_proj": Factors(np.zeros((1, 2)), np.zeros((2, 1)), 1.0)})
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj: expected .*, got \[1, 2\] and \[2, 1\]"):
        put_adapter(engine.lm, 0, wrong)
    with pytest.raises(RequestError, match="name: expected a name that no loaded adapter has, got 'first'"):
        engine.adapters.put("first", made.folders["first"])
    with pytest.raises(RequestError, match="got 'bad'"):
        engine.adapters.remove("bad")
    engine.reset_cache()
    after = engine.generate([PROMPT] * 2, GREEDY, adapter=["first", "without rows"])
    assert [r.token_ids for r in after] == [r.token_ids for r in before]
    with pytest.raises(CheckpointError, match="at most one adapter, got several"):
        save_model(engine.lm, tmp_path / "saved")


@pytest.mark.further
@untied
def test_a_model_without_room_says_so(made: Made) -> None:
    with pytest.raises(CheckpointError, match="expected a base model without an adapter"):
        load_model(made.base, adapter=made.folders["first"], adapters=2, lora_rank=RANK)
    engine = Engine(made.merged[""], max_batch=1, max_length=64)
    with pytest.raises(RequestError, match="adapter slots: expected a free one, got 0 in use"):
        engine.adapters.put("first", made.folders["first"])
    with pytest.raises(RequestError, match=r"request 0: adapter: expected the base model, got 'first'; loaded: none"):
        engine.generate([PROMPT], GREEDY, adapter="first")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path, LanguageModel]]:
    """Serve the embedded model with two adapter slots; clients may load three adapters."""
    folder = tmp_path_factory.mktemp("served")
    base = load_model("demo")
    for number, name in enumerate(["one", "two", "three"]):
        write(base, folder / name, number, 2, shared=True, rows=False, scale=0.15)
    (folder / "broken").mkdir()
    engine = Engine(load_model("demo", adapters=2, lora_rank=2), max_length=1024, max_batch=4)
    with serving(engine, adapter_folder=str(folder)) as running:
        yield running, folder, base


def post(running: Running, path: str, **body: str) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/{path}", json=body)


@pytest.mark.further
def test_clients_ask_for_adapters_as_models(served: tuple[Running, Path, LanguageModel]) -> None:
    running, folder, _ = served
    client = running.client()
    for name in ("one", "two"):
        loaded = post(running, "load_lora_adapter", lora_name=name, lora_path=name)
        assert loaded.status_code == 200 and loaded.json()["parent"] == "demo"
    assert [model.id for model in client.models.list()] == ["demo", "one", "two"]
    assert client.models.retrieve("two").id == "two"

    def answer(name: str) -> Any:
        return client.chat.completions.create(**ask(model=name, max_tokens=60))

    with ThreadPoolExecutor(3) as pool:  # side by side, in one batch
        answers = dict(zip(("demo", "one", "two"), pool.map(answer, ("demo", "one", "two")), strict=True))
    assert {name: found.model for name, found in answers.items()} == {name: name for name in answers}
    for name, found in answers.items():
        lm = load_model("demo", adapter=None if name == "demo" else folder / name)
        alone = Engine(lm, max_length=1024, max_batch=1)
        (expected,) = alone.generate([ask()["messages"]], SamplingParams(max_content_tokens=60, max_new_tokens=400))
        assert found.choices[0].message.content == expected.text
    assert len({found.choices[0].message.content for found in answers.values()}) == 3

    full = post(running, "load_lora_adapter", lora_name="three", lora_path="three")
    assert full.status_code == 400 and "adapter slots: expected a free one, got 2 in use" in full.text
    assert post(running, "unload_lora_adapter", lora_name="one").json()["deleted"] is True
    assert post(running, "load_lora_adapter", lora_name="three", lora_path="three").status_code == 200
    gone = httpx.post(f"{running.url}/v1/chat/completions", json=ask(model="one"))
    assert gone.status_code == 404 and "unknown model 'one'; available: 'demo', 'two', 'three'" in gone.text
    assert answer("three").choices[0].message.content != answers["one"].choices[0].message.content
    for name in ("two", "three"):
        assert post(running, "unload_lora_adapter", lora_name=name).status_code == 200


@pytest.mark.further
@pytest.mark.parametrize(
    "name, path, status, message",
    [
        ("x", "../elsewhere", 400, "expected a folder inside the adapter folder"),
        ("x", "/etc", 400, "expected a folder inside the adapter folder"),
        ("x", "broken", 400, "expected an adapter folder"),
        ("x", "none", 400, "expected an adapter folder"),
        ("demo", "one", 400, "other than the model's, got 'demo'"),
        ("", "one", 400, "lora_name"),
    ],
)
def test_bad_ones_are_refused(
    served: tuple[Running, Path, LanguageModel], name: str, path: str, status: int, message: str
) -> None:
    running = served[0]
    refused = post(running, "load_lora_adapter", lora_name=name, lora_path=path)
    assert refused.status_code == status and message in refused.json()["error"]["message"]
    assert post(running, "unload_lora_adapter", lora_name="demo").status_code == 404
    assert running.client().chat.completions.create(**ask(max_tokens=5)).choices  # nothing has happened


def test_servers_without_a_folder_take_none(engine_without: Running) -> None:
    assert post(engine_without, "load_lora_adapter", lora_name="x", lora_path="x").status_code in (404, 405)


@pytest.fixture
def engine_without() -> Iterator[Running]:
    with serving(Engine(load_model("demo"), max_length=256, max_batch=1)) as running:
        yield running
