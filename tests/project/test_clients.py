"""Evaluation harnesses and load generators against a server, compared with the engine.

They run in an environment of their own, which `make test-clients` makes from requirements-clients.txt.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd_jax import load_model
from aspd_jax.formats import find_model
from aspd_jax.layout import build_layout
from infer import Engine, SamplingParams
from tests.conftest import ROOT
from tests.helpers.serving import Running, serving

CLIENTS = ROOT / ".venv-clients" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLIENTS.is_dir(), reason="there is no .venv-clients; make test-clients makes it"),
]
CHOICES = [
    {"question": "3 pens at $20", "choices": [" 60", " 40 or so"], "answer": 0},
    {"question": "The sky is", "choices": [" blue", " red, I think"], "answer": 0},
]
TEXTS = [{"text": "Price each line.\n3 pens at $20 and 4 books."}, {"text": "Here is what we have."}]
TASKS: dict[str, dict[str, Any]] = {
    "aspd_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    },
    "aspd_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "aspd_until": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "60",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load_model("demo"), max_length=2048, max_batch=2)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


def run(folder: Path, name: str, *arguments: str, **environment: str) -> str:
    """Run a client, which may not look for anything on the network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(CLIENTS / name), *arguments], cwd=folder, env=own | offline | {"OPENAI_API_KEY": "none"} | environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def harness(folder: Path, kind: str, arguments: dict[str, Any], tasks: list[str], *more: str) -> dict[str, list[Any]]:
    """Run lm-eval; the responses of each task."""
    for name in tasks:
        records = folder / f"{name}.json"
        records.write_text(json.dumps(TEXTS if name == "aspd_rolling" else CHOICES))
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(records)}}}
        (folder / f"{name}.yaml").write_text(json.dumps(task | {"test_split": "test"} | TASKS[name]))
    spelled = ",".join(f"{key}={value}" for key, value in arguments.items())
    run(
        folder, "lm_eval", "--model", kind, "--model_args", spelled, "--tasks", ",".join(tasks),
        "--include_path", str(folder), "--output_path", str(folder / kind), "--log_samples", *more,
    )  # fmt: skip
    found = {}
    for name in tasks:
        (file,) = (folder / kind).rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        found[name] = [sample["resps"] for sample in samples]
    return found


def likelihood(engine: Engine, context: list[int], continuation: list[int]) -> float:
    """The sum of log probabilities, by one full pass."""
    lm, ids = engine.lm, np.asarray([[*context, *continuation]], np.int32)
    assert lm.special_tokens is not None
    layout = build_layout(ids, lm.special_tokens, lm.config.positions)
    logits = jnp.asarray(lm.model.apply({"params": lm.params}, ids, layout))[0]
    likely = np.asarray(jax.nn.log_softmax(logits))[:-1][np.arange(ids.size - 1), ids[0, 1:]]
    return float(likely[len(context) - 1 :].sum())


def test_lm_eval(server: Running, tmp_path: Path) -> None:
    """Check the defaults: log-likelihoods equal those of a full pass, and of the harness's model in torch."""
    folder, engine = find_model("demo"), server.engine
    url = f"{server.url}/v1/completions"
    found = harness(tmp_path, "local-completions", {"model": "demo", "base_url": url, "tokenizer": folder}, list(TASKS))
    encode = engine.lm.codec.text.encode
    ours = [[likelihood(engine, encode(of["question"]), encode(choice)) for choice in of["choices"]] for of in CHOICES]
    theirs = [[float(response[0][0]) for response in of] for of in found["aspd_choice"]]
    np.testing.assert_allclose(theirs, ours, atol=1e-3)
    end = [engine.config.end[0]]
    rolling = [likelihood(engine, end, encode(of["text"])) for of in TEXTS]
    np.testing.assert_allclose([float(of[0][0]) for of in found["aspd_rolling"]], rolling, atol=1e-3)
    params = SamplingParams(max_new_tokens=400, max_content_tokens=12, stop=("\n",))
    answers = engine.generate([of["question"] for of in CHOICES], params)
    assert [of[0][0] for of in found["aspd_until"]] == [answer.text for answer in answers]
    torch = harness(
        tmp_path, "hf", {"pretrained": folder, "dtype": "float32"}, ["aspd_choice", "aspd_rolling"], "--device", "cpu"
    )
    assert theirs != ours and np.ptp(theirs) > 1, "negative control: they are not computed here, and they differ"
    np.testing.assert_allclose(
        theirs, [[float(response[0][0]) for response in of] for of in torch["aspd_choice"]], atol=1e-3
    )
    np.testing.assert_allclose(rolling, [float(of[0][0]) for of in torch["aspd_rolling"]], atol=1e-3)


def test_lm_eval_over_chat(server: Running, tmp_path: Path) -> None:
    url = f"{server.url}/v1/chat/completions"
    arguments = {"model": "demo", "base_url": url}
    found = harness(tmp_path, "local-chat-completions", arguments, ["aspd_until"], "--apply_chat_template")
    messages = [[{"role": "user", "content": of["question"]}] for of in CHOICES]
    params = SamplingParams(max_new_tokens=400, max_content_tokens=12, stop=("\n",))
    answers = server.engine.generate(messages, params)
    assert [of[0][0] for of in found["aspd_until"]] == [answer.text for answer in answers]


def test_guidellm(server: Running, tmp_path: Path) -> None:
    """Check that every request succeeds with the requested number of tokens."""
    run(
        tmp_path, "guidellm", "run", "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--tokenizer", f"kind=huggingface_auto,model={find_model('demo')}",
        "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-progress",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == totals["total"] == 4
    assert {request["output_tokens"] for request in benchmark["requests"]["successful"]} == {8}


def test_inspect(server: Running, tmp_path: Path) -> None:
    (tmp_path / "pens.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import includes\n"
        "from inspect_ai.solver import generate\n\n"
        "@task\n"
        "def pens():\n"
        "    samples = [Sample(input='3 pens at $20', target='60'), Sample(input='The sky is', target='blue')]\n"
        "    return Task(dataset=samples, solver=generate(), scorer=includes())\n"
    )
    environment = {"ASPD_API_KEY": "none", "ASPD_BASE_URL": f"{server.url}/v1"}
    run(
        tmp_path, "inspect", "eval", "pens.py", "--model", "openai-api/aspd/demo", "--display", "plain",
        "--max-tokens", "20", "--log-format", "json", "--log-dir", "logs", **environment,
    )  # fmt: skip
    (file,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success" and log["results"]["completed_samples"] == 2
