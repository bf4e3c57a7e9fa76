"""Fixtures: tiny models with weights from NumPy seeds, and published data in `../shared`, if it exists."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, wraps
from importlib.metadata import version
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

# Use the CPU, except in `tests/accelerator.sh`.
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    # Simulate eight devices, and use the fastest compilation, which takes most of the time of these tests.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=8"
        + " --xla_backend_optimization_level=0"
        + " --xla_cpu_parallel_codegen_split_count=1"
    )
    if version("jaxlib").startswith("0.10."):  # later versions end with an error at this flag
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # saves 3 % of the time of these tests
if "PYTEST_XDIST_WORKER" not in os.environ:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # set it to keep compiled programs between runs
        # Workers share compiled programs, which are removed at the end.
        PROGRAMS = TemporaryDirectory(prefix="aspd-jax-programs-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS.name
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # each arena of the many threads would keep memory of compilations
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = "-1"  # a size limit would scan all files for each new program
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.6"  # storing smaller ones costs more than it saves
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast
from xdist.scheduler import LoadScopeScheduling

import aspd  # noqa: F401 (import first: it sets XLA's flags)
import infer.decode.checking
import infer.decode.decode_step
import infer.decode.derived
import infer.decode.guidance
import infer.scheduling.runner
import infer.scheduling.scheduler
import infer.scheduling.step_cost
import infer.scheduling.warm_up
from aspd_jax import LanguageModel, SpecialTokens, load_model
from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import next_power
from infer import Engine
from infer.control.tags import Tags
from infer.decode.derived import BranchBudget
from infer.decode.guidance import guidance_arrays, guide
from infer.decode.inputs import plan_step
from infer.decode.slots import admit
from infer.decode.state import PROMPT, DecodeState, EngineConfig, SequenceState, waiting
from infer.request import Request
from infer.scheduling.admission import admission, classes_of, new_state
from infer.scheduling.buckets import capacity_for
from tests.helpers.byte_tokenizer import train_tokenizer
from tests.helpers.cached_answers import cached_answer
from tests.helpers.tasks import problem

ROOT = Path(__file__).parent.parent
# Tests compare exactly, so they load float32 on accelerators too.
load_model.__defaults__ = ("float32", *(load_model.__defaults__ or ())[1:])
GOLDEN = Path(__file__).parent / "golden"
SHARED = ROOT.parent / "shared"
# Tests with the same purpose that need only the repository, for each function that reads `../shared`.
COUNTERPARTS = {
    "infer/control/test_lists.py::test_serial_text_waits_where_a_line_begins_an_item": (
        "infer/control/test_lists.py::test_an_answer_is_what_the_model_writes",
    ),
    # The copy in tests/golden is up to date.
    "aspd_jax/test_layout.py::test_unseen_cases_of_the_same_kind_are_the_ones_in_shared": (
        "aspd_jax/test_layout.py::test_authors_positions_and_mask",
    ),
    "infer/test_replay.py::test_seeded_weights_and_vectors_are_the_authors": (
        "infer/test_replay.py::test_authors_engine",
    ),
    # Published tokenizers and templates; the repository makes ones of the same kinds.
    "aspd_jax/test_tokens.py::_real": (
        "aspd_jax/test_tokens.py::test_segments_are_exact",
        "aspd_jax/test_tokens.py::test_linearisation_round_trip",
    ),
    "aspd_jax/test_chat_templates.py::test_real_templates": (
        "aspd_jax/test_chat_templates.py::test_an_answer_is_learned_behind_the_prompt_that_asks_for_it",
    ),
    "aspd_jax/test_tool_format.py::test_a_real_template": ("aspd_jax/test_tool_format.py::test_formats",),
    "train/test_records.py::test_a_real_chat_template": (
        "train/test_records.py::test_every_turn_is_kept_and_loss_lies_on_answers",
    ),
    # A published checkpoint and its greedy answer.
    "infer/test_engine.py::test_real_checkpoint_greedy": ("infer/test_decoding.py::test_answers_equal_transformers",),
    "aspd/test_cli.py::test_real_checkpoint_from_the_command_line": (
        "aspd/test_cli.py::test_generate_answers_without_a_chat_template",
        "infer/test_decoding.py::test_answers_equal_transformers",
    ),
    # Published questions and answers.
    "aspd_jax/test_lists.py::test_real_answers": (
        "aspd_jax/test_lists.py::test_decisions_on_further_items_are_final",
        "aspd_jax/test_lists.py::test_questions_for_items_fork",
    ),
    "aspd_jax/blocks/test_extract.py::test_real_answers_are_kept_and_their_lists_found": (
        "aspd_jax/blocks/test_extract.py::test_forms",
        "aspd_jax/blocks/test_extract.py::test_any_text_is_kept",
    ),
    "project/test_questions.py::test_fingerprints_are_those_of_the_benchmarks": (
        "project/test_questions.py::test_our_own_are_different_and_in_no_benchmark",
    ),
    "infer/evaluation/test_questions.py::test_vicuna_bench_has_37_suitable_questions": (
        "infer/evaluation/test_questions.py::test_suitable_questions_are_marked",
    ),
    "infer/evaluation/test_questions.py::test_real_files": ("infer/evaluation/test_questions.py::test_fastchat_files",),
}


def shared(*parts: str) -> Path:
    """Return a path in `../shared`; skip the test if there is no such folder."""
    if not SHARED.exists():
        pytest.skip("no ../shared")
    return SHARED.joinpath(*parts)


# The machine may be busy, so no test has a deadline. `make test` draws fewer examples, and `make test-all` as many.
settings.register_profile("few", deadline=None, max_examples=25)
settings.register_profile("many", deadline=None, max_examples=100)
settings.load_profile("few")


# Engines of these sizes over `lm` share their compiled programs.
SIZES: dict[str, int] = {"max_length": 512, "max_batch": 4, "max_branches": 8}

# Words of modules whose tests share programs, by the name of their family; the most frequent words count.
FAMILIES = {
    "demo": r"demo_engine: |server: Running|load_model\(\"demo\"",
    "lm": r"\(lm: |, lm: |\bSIZES\b",
    "bare": r"bare_lm: |authors_lm: |tests\.helpers\.answers import",
}
CASES = 3  # cases of a parametrised test that `make test` runs, without the marker `default_cases`
END = float(os.environ.get("FURTHER_TESTS_END", "inf"))  # seconds since 1970, after which no further test begins
TESTS = count(1)
GROWTH = 5 << 28  # bytes of memory that compiled programs may take before they are dropped
resident_after_drop = 0


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drop_programs() -> None:
    """Drop compiled programs, and return their memory to the system."""
    global resident_after_drop
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident_after_drop = resident()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop compiled programs when they take much memory or many memory maps; counting is slow, so every fourth test."""
    if sys.platform == "linux" and next(TESTS) % 4 == 0:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
        if maps > 2 / 3 * most or resident() > resident_after_drop + GROWTH:
            drop_programs()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test after the first ones as further tests."""
    numbers = Counter[str]()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if case and not item.get_closest_marker("slow") and not item.get_closest_marker("further"):
            marker = item.get_closest_marker("default_cases")
            if numbers[name] >= (marker.args[0] if marker else CASES):
                item.add_marker("further")
            numbers[name] += 1
    order = {name: number for number, name in enumerate(FAMILIES)}
    items.sort(key=lambda item: order.get(family(item.nodeid), len(order)))


def family(nodeid: str) -> str:
    """Return the family of a test's module, or the module itself."""
    return _family(nodeid.partition("::")[0])


@cache
def _family(module: str) -> str:
    text = (ROOT / module).read_text()
    counts = {name: len(re.findall(words, text)) for name, words in FAMILIES.items()}
    return max(counts, key=lambda name: counts[name]) if any(counts.values()) else module


class FamilyScheduling(LoadScopeScheduling):
    """Distribution of tests in which a family runs in one process, which compiles its programs once."""

    def _split_scope(self, nodeid: str) -> str:
        return family(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FamilyScheduling | None:
    """Replace `loadgroup`, whose groups pytest 9 does not show in the ids of tests."""
    return FamilyScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip tests for which no time is left."""
    if time.time() > END:
        pytest.skip("no time is left")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the controller the largest memory of this worker and of a process that it started."""
    if hasattr(session.config, "workeroutput"):
        sizes = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        session.config.workeroutput["peak"] = [size / 1e6 for size in sizes]  # ru_maxrss is in KB


PEAKS: list[list[float]] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker told."""
    PEAKS.append(node.workeroutput["peak"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report memory, and modules with tests for which no time was left."""
    peaks = "; ".join(f"{own:.1f} GB, a process that it started {other:.1f} GB" for own, other in PEAKS)
    if PEAKS:
        terminalreporter.line(f"largest memory of each worker: {peaks}")
    late = Counter(
        report.nodeid.partition("::")[0]
        for report in terminalreporter.stats.get("skipped", [])
        if "no time is left" in str(report.longrepr)
    )
    for module, tests in late.items():
        terminalreporter.line(f"not run, no time was left: {module}, {tests} tests")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which would scan them repeatedly."""
    global resident_after_drop
    resident_after_drop = resident()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def with_one_program(engine: Engine) -> Engine:
    """Return an engine of one row that runs all steps, of at most 64 tokens each, in one program."""
    buckets = engine.buckets
    assert buckets.rows == 1
    vars(buckets)["buckets"] = [Bucket(1, 64, 64, buckets.capacity, 0)]
    vars(buckets)["prefill_chunk"] = lambda tokens: 64
    return engine


def with_whole_rows(engine: Engine) -> Engine:
    """Return an engine whose programs read whole rows of the cache: half as many are compiled."""
    buckets = engine.buckets
    vars(buckets)["buckets"] = [bucket for bucket in buckets.buckets if bucket.slots == buckets.capacity]
    return engine


@contextmanager
def patched(module: ModuleType = infer.decode.decode_step, **functions: Any) -> Iterator[None]:
    """Replace functions of the step or of `guide`, which are traced again with them; other programs remain."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():
            patch.setattr(module, name, function)
        compiled, inner = infer.decode.decode_step.run, infer.decode.decode_step.run.__wrapped__
        again = jax.jit(wraps(inner)(lambda *args: inner(*args)), static_argnames=("config", "bucket", "drafting"))
        scheduling = (infer.scheduling.runner, infer.scheduling.step_cost, infer.scheduling.warm_up)
        for user in (infer.decode.decode_step, *scheduling):
            if getattr(user, "run", None) is compiled:
                patch.setattr(user, "run", again)
        summary = infer.decode.decode_step.summarise.__wrapped__  # has a trace of its own in the step
        again = jax.jit(wraps(summary)(lambda *args: summary(*args)), static_argnames="config")
        patch.setattr(infer.decode.decode_step, "summarise", again)
        checks = infer.decode.checking.run_checks.__wrapped__
        again = jax.jit(wraps(checks)(lambda *args: checks(*args)), static_argnames=("config", "bucket"))
        patch.setattr(infer.scheduling.runner, "run_checks", again)
        if module is infer.decode.guidance:
            decide = infer.decode.guidance.guide.__wrapped__
            retraced = jax.jit(wraps(decide)(lambda *args: decide(*args)), static_argnames="config")
            patch.setattr(infer.scheduling.scheduler, "guide", retraced)
        yield


@contextmanager
def deferred_branches(count: int, **functions: Callable[..., Any]) -> Iterator[None]:
    """Let a step feed at most `count` branches of a sequence, as if the others did not fit; replace more functions."""

    def first_branches(s: SequenceState, budget: BranchBudget) -> Any:
        able = s.branches.live & budget.final
        return able & (jnp.cumsum(able, axis=1) <= count)

    with patched(infer.decode.derived, ready_branches=first_branches, **functions):
        yield


@partial(jax.jit, static_argnames=("config", "bucket", "drafting"))
def one_step(
    params: Any, state: DecodeState, config: EngineConfig, bucket: Bucket, drafting: bool = False
) -> DecodeState:
    """Run one decoding step."""
    plan = plan_step(state, config, bucket)
    return infer.decode.decode_step.step(params, state, plan, config, bucket, drafting)[0]


def decided(lm: LanguageModel, config: EngineConfig, state: DecodeState) -> DecodeState:
    """Return a state in which no sequence waits for a decision at a tag."""
    classes, words, batch = classes_of(lm, config), state.token_mask.shape[3], state.cache.tokens.shape[0]
    tags = [Tags(config, classes) for _ in range(batch)]
    while rows := np.flatnonzero(waiting(state.sequence)).tolist():
        decisions = {row: tags[row].follow(cached_answer(state, config, row)) for row in rows}
        state, _ = guide(state, guidance_arrays(decisions, batch, words, config), config)
    return state


def laid_out(lm: LanguageModel, config: EngineConfig, requests: Sequence[Request]) -> DecodeState:
    """Return a state with rows for these requests, whose prompts are admitted and not yet fed."""
    capacity = capacity_for(max(len(request.prompt) + request.budget for request in requests))
    state = new_state(lm, config, next_power(len(requests)), capacity)
    for row, request in enumerate(requests):
        state = admit(state, admission(lm, config, state, request, row), config)
    return state


def after_prompts(lm: LanguageModel, config: EngineConfig, requests: Sequence[Request]) -> DecodeState:
    """Return a state of these requests, their prompts fed and the first tokens of their answers sampled."""
    state, longest = laid_out(lm, config, requests), next_power(max(len(request.prompt) for request in requests))
    rows, capacity = state.cache.tokens.shape
    state = one_step(lm.params, state, config, Bucket(rows, rows * longest, longest, capacity))
    assert not (state.sequence.cursor.phase == PROMPT).any(), "one step feeds all prompts"
    return state


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    } | changes


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Hugging Face checkpoint, written down independently of the project."""
    embed, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or embed // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    family = config["model_type"]
    attention_bias = config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, embed),
        "model.norm.weight": (embed,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, embed)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linear = {
            "self_attn.q_proj": (queries, embed, attention_bias or family == "qwen2"),
            "self_attn.k_proj": (keys, embed, attention_bias or family == "qwen2"),
            "self_attn.v_proj": (keys, embed, attention_bias or family == "qwen2"),
            "self_attn.o_proj": (embed, queries, attention_bias),
            "mlp.gate_proj": (inner, embed, config.get("mlp_bias", False)),
            "mlp.up_proj": (inner, embed, config.get("mlp_bias", False)),
            "mlp.down_proj": (embed, inner, config.get("mlp_bias", False)),
        }
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = (embed,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (embed,)
        if family == "gemma3_text":
            shapes[f"{prefix}pre_feedforward_layernorm.weight"] = (embed,)
            shapes[f"{prefix}post_feedforward_layernorm.weight"] = (embed,)
        if family in ("qwen3", "gemma3_text"):
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head,)
    return shapes


def seeded_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, large enough that every part of the model shows in the logits."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        values = random.standard_normal(shape) * (0.2 if len(shape) == 2 else 0.3)
        around_one = "norm" in name and config["model_type"] != "gemma3_text"
        tensors[name] = (values + (1.0 if around_one else 0.0)).astype(np.float32)
    return tensors


def write_checkpoint(
    folder: Path, config: dict[str, Any], seed: int = 0, tensors: dict[str, np.ndarray] | None = None
) -> Path:
    """Write a Hugging Face folder without a tokenizer; its weights are seeded, or `tensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = seeded_tensors(config, seed) if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer with the six special tokens."""
    return train_tokenizer((problem(seed, False).answer for seed in range(200)), 400)


@pytest.fixture(scope="session")
def lm(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """A tiny random model with a tokenizer; float32."""
    config = tiny_config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), config, seed=1)
    tokenizer.save_pretrained(folder)
    return replace(load_model(folder), tagged=True)


@pytest.fixture(scope="session")
def bare_lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A tiny random model without a tokenizer: 24 tokens, of which 17 to 22 are the tags and 0 is end of text."""
    folder = write_checkpoint(tmp_path_factory.mktemp("bare"), tiny_config(vocab_size=24), seed=2)
    bare = replace(load_model(folder), tagged=True)
    bare.special_tokens = SpecialTokens(17, 18, 19, 20, 21, 22)
    return bare


@pytest.fixture(scope="session")
def engine(bare_lm: LanguageModel) -> Engine:
    """An engine over the tiny model without a tokenizer."""
    return Engine(bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=(15, 16))
