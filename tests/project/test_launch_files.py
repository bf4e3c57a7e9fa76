"""Launch files: syntax of scripts, objects of Kubernetes, and commands whose options exist."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import aspd
from aspd_jax.configuration import read_config
from aspd_jax.errors import ConfigError
from tests.conftest import ROOT
from train.config import TrainConfig

SCRIPTS = sorted([*ROOT.glob("*/launch/*.sh"), *ROOT.glob("*/launch/*.sbatch")])
MANIFESTS = sorted(ROOT.glob("*/launch/*.yaml"))
CONTAINERFILE = ROOT / "infer" / "launch" / "Containerfile"
DIRECTIVES = {  # of sbatch
    *("--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--gpu-bind", "--cpus-per-task"),
    *("--time", "--requeue", "--open-mode"),
}


def manifests(file: Path) -> list[dict[str, Any]]:
    return [value for value in yaml.safe_load_all(file.read_text()) if value is not None]


def containers(file: Path) -> list[dict[str, Any]]:
    workloads = (value for value in manifests(file) if value["kind"] in ("Job", "Deployment"))
    return [container for value in workloads for container in value["spec"]["template"]["spec"]["containers"]]


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options of a command, in which the values of variables are 0."""
    options, rest = aspd.build_parser().parse_known_args([re.sub(r"^\$\w+$", "0", word) for word in words])
    assert not [word for word in rest if word.startswith("-") or "=" not in word], rest
    return options


def test_files_exist() -> None:
    assert [file.name for file in SCRIPTS + MANIFESTS] == ["cloud_tpu.sh", "slurm.sbatch", "gke.yaml", "gke.yaml"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_bash_reads_the_scripts(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    (tmp_path / "broken.sh").write_text(script.read_text().replace(")", "", 1) + "\nif true; then\n")
    assert subprocess.run(["bash", "-n", str(tmp_path / "broken.sh")], capture_output=True).returncode, "control"


def test_commands_of_scripts(tmp_path: Path) -> None:
    """Check the options of `aspd train` as the shell passes them, and the directives of SLURM."""
    for script, arguments in (("slurm.sbatch", ["c.yaml", "out", "mesh.fsdp=16"]), ("cloud_tpu.sh", [])):
        text = (ROOT / "train" / "launch" / script).read_text()
        stubs = "srun() { shift; printf '%s\\n' \"$*\"; }; gcloud() { printf '%s\\n' \"${@: -1}\"; }\n"
        arguments = arguments or ["name", "zone", "bucket", "c.yaml", "out", "mesh.fsdp=16"]
        command = ["bash", "-c", stubs + text, script, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (command,) = re.findall(r"aspd (train .*)", done.stdout)
        options = parse(shlex.split(command))
        assert options.distributed and options.config == "c.yaml" and Path(options.output).name == "out"
    text = (ROOT / "train/launch/slurm.sbatch").read_text()
    directives = dict(re.findall(r"^#SBATCH (--[a-z-]+)(?:=(\S+))?", text, re.MULTILINE))
    assert set(directives) == DIRECTIVES
    # JAX takes the GPU of the number of the process, of all GPUs that it sees.
    assert directives["--gpu-bind"] == "none" and directives["--gpus-per-node"] == directives["--ntasks-per-node"]


def test_hosts_get_the_checkout_without_its_environments_and_runs(tmp_path: Path) -> None:
    for file in ("aspd/a.py", ".venv/b", ".git/c", "runs/d", "checkpoints/e", "tests/train/runs/f"):
        (tmp_path / "clone" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / file).touch()
    text = (ROOT / "train" / "launch" / "cloud_tpu.sh").read_text()
    stub = 'gcloud() { [[ $4 != scp ]] || tar -tzf "${@: -2:1}" >&2; }\n'
    command = ["bash", "-c", stub + text, "cloud_tpu.sh", "name", "zone", "bucket", "c.yaml", "out"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path / "clone", capture_output=True, text=True, env=environment)
    copied = [name for name in done.stderr.splitlines() if not name.endswith("/")]
    assert done.returncode == 0 and sorted(copied) == ["./aspd/a.py", "./tests/train/runs/f"]
    assert [path.name for path in tmp_path.iterdir()] == ["clone"], "no archive remains"


def training_examples() -> list[list[str]]:
    """Return the configuration and the overrides of each training command in the launch files."""
    (trainer,) = containers(ROOT / "train" / "launch" / "gke.yaml")
    texts = [file.read_text() for file in SCRIPTS] + trainer["args"]
    lines = [line for text in texts for line in text.splitlines() if "configs/" in line]
    return [re.findall(r"configs/\S+\.yaml|[a-z]\w*\.\w+=\S+", line) for line in lines]


def test_configurations_of_training_examples() -> None:
    """The rows of the batch fit the mesh of each example."""
    examples = training_examples()
    assert len(examples) == 3
    for config, *overrides in examples:
        assert read_config(TrainConfig, ROOT / config, overrides).mesh.fsdp == 16
        with pytest.raises(ConfigError, match="expected a multiple of mesh"):  # negative control
            read_config(TrainConfig, ROOT / config, ["mesh.fsdp=16"])


def test_commands_of_manifests() -> None:
    """Check the options of `aspd` in the containers, and that a server drains before it is killed."""
    (trainer,) = containers(ROOT / "train" / "launch" / "gke.yaml")
    (script,) = trainer["args"]
    assert trainer["command"] == ["/bin/bash", "-c"] and script.startswith("exec aspd train ")
    options = parse(shlex.split(script)[2:])
    service, job = manifests(ROOT / "train" / "launch" / "gke.yaml")
    host, _, port = options.coordinator.partition(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(port) == trainer["ports"][0]["containerPort"]
    assert options.processes == job["spec"]["completions"] == job["spec"]["parallelism"] and options.process == 0
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert (ROOT / options.config).exists()

    (server,) = containers(ROOT / "infer" / "launch" / "gke.yaml")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", CONTAINERFILE.read_text(), re.MULTILINE)
    options = parse([*yaml.safe_load(entry)[1:], *server["args"]])
    deployment, service = manifests(ROOT / "infer" / "launch" / "gke.yaml")
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > options.drain
    assert options.port == server["ports"][0]["containerPort"] == service["spec"]["ports"][0]["targetPort"]
    assert {server[probe]["httpGet"]["port"] for probe in server if probe.endswith("Probe")} == {options.port}
    with pytest.raises(SystemExit):
        parse(["serve", "--batch", "many"])


def test_the_container_copies_what_exists() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", CONTAINERFILE.read_text(), re.MULTILINE)
    sources = [name for line in copied for name in line.split()]
    assert len(sources) >= 8 and all((ROOT / name).exists() for name in sources)


@pytest.mark.slow
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_objects_of_kubernetes(file: Path) -> None:
    """Check fields, types and required fields with the classes of Kubernetes' own client library."""
    client = pytest.importorskip("kubernetes").client.ApiClient()

    def written(value: dict[str, Any]) -> Any:
        made = client.deserialize(json.dumps(value), f"V1{value['kind']}", "application/json")
        return client.sanitize_for_serialization(made)  # without fields that the classes do not have

    for value in manifests(file):
        assert value["apiVersion"] in ("v1", "apps/v1", "batch/v1") and written(value) == value
        wrong = value | {"spec": value["spec"] | {"selectors": {}}}
        assert written(wrong) != wrong, "negative control: a misspelt field"
        with pytest.raises(ValueError, match="name"):  # negative control: a number where text belongs
            written(value | {"metadata": {"name": 3}})
        if "template" in value["spec"]:  # negative control: a required field
            del value["spec"]["template"]
            with pytest.raises(ValueError, match="template"):
                written(value)


@pytest.mark.slow
def test_the_steps_of_an_accelerator_are_rehearsed(tmp_path: Path) -> None:
    """Run the first steps with the embedded model, and read their tables in the summary."""
    asked = {"question_id": 1, "category": "generic", "turns": ["How do kinds of tea differ?"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(asked) + "\n")
    settings = {
        "ANY_DEVICE": "1", "MODELS": "demo", "QUESTIONS": str(tmp_path / "questions.jsonl"), "PYTHON": sys.executable,
        "REAL": "--tasks 1 --max-new-tokens 24 --batch 1", "LIMIT": "900", "TOTAL": "1800",  # a CPU may be busy
    }  # fmt: skip
    command = [str(ROOT / "tests" / "accelerator.sh"), str(tmp_path / "out"), "fields", "decisions", "lists"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 0 and summary == done.stdout
    for row in ("| all (1) | exact |", "| one pass |", "| demo | 1 | 1 |"):
        assert row in summary
    answers = [json.loads(line) for line in (tmp_path / "out" / "lists" / "answers.jsonl").read_text().splitlines()]
    assert [answer["mode"] for answer in answers] == ["serial", "adaptive"]
    settings |= {"TOTAL": "0"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.stdout.count("no time left") == 3, "negative control: the limit of all steps"
