"""Run of an evaluation: answers and speed of every system on every benchmark. A run can be resumed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from aspd_jax import formats
from aspd_jax.configuration import config_from_dict
from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.files import write_whole
from aspd_jax.formats.side_files import read_object
from aspd_jax.language_model import LanguageModel, for_conversations, load_model
from infer.engine import Engine
from infer.evaluation.config import EvalConfig, ModelSection
from infer.evaluation.conversations import answer_questions, write_model_answers
from infer.evaluation.questions import Question
from infer.evaluation.speed import time_questions

PACKAGES = ("aspd-jax", "jax", "jaxlib", "flax", "transformers", "tokenizers", "numpy", "scipy")


def run(
    config: EvalConfig, questions: Mapping[str, Sequence[Question]], output: Path, left_out: Sequence[str] = ()
) -> None:
    """Answer and time all questions whose results the output folder does not hold yet.

    Args:
        config: configuration of the evaluation.
        questions: questions by benchmark.
        output: folder of the run.
        left_out: descriptions of invalid lines of question files, for the report.

    Raises:
        ConfigError: the folder holds another evaluation.
        AspdError: a model cannot be loaded or evaluated; finished results are kept.
    """
    _claim(config, questions, output, left_out)
    for name, section in config.models.items():
        todo = [(system, bench) for system in config.systems if system.model == name for bench in questions]
        lm = load(section)
        engine = Engine(lm, config.decoding.length(lm.context_length), max_batch=config.decoding.batch)
        for system, bench in todo:
            records = answer_questions(
                engine, system, questions[bench], config.decoding, results_file(output, "answers", bench, system.name),
                f"{system.name}: {bench}",
            )  # fmt: skip
            write_model_answers(records, system, results_file(output, "model_answer", bench, system.name))
        if config.speed.questions:
            engine = Engine(lm, config.decoding.length(lm.context_length), max_batch=1)
            for system, bench in todo:
                time_questions(
                    engine, system, [q for q in questions[bench] if not q.options], config.decoding, config.speed,
                    results_file(output, "speed", bench, system.name), f"{system.name}: {bench}, speed",
                )  # fmt: skip


def load(section: ModelSection) -> LanguageModel:
    """Load a model under evaluation with its chat template.

    Raises:
        CheckpointError: the model has no tokenizer or no chat template.
    """
    lm = load_model(section.path, section.dtype, weights=section.weights, adapter=section.adapter or None)
    for_conversations(lm, section.path, section.chat_template)
    if lm.tokenizer.chat_template is None:
        raise CheckpointError(
            f"{section.path}: expected a chat template, got none. Set chat_template to a Jinja file such as "
            "configs/chat/vicuna.jinja."
        )
    return lm


def results_file(output: Path, kind: str, bench: str, system: str) -> Path:
    """Return the file with the results of a system; `kind`: `answers`, their timings in `speed`, or `model_answer`."""
    return output / kind / bench / f"{system}.jsonl"


def read_run(output: Path) -> tuple[EvalConfig, dict[str, Any]]:
    """Read the configuration and the environment of a run.

    Raises:
        ConfigError: the folder holds no evaluation, or a damaged one.
    """
    file = output / "config.json"
    if not file.is_file():
        raise ConfigError(f"{output}: expected an evaluation, got none. Create one with `aspd eval run`.")
    try:
        settings, known = read_object(file), read_object(output / "environment.json")
    except CheckpointError as error:
        raise ConfigError(str(error).removesuffix(" Download the file again.")) from None
    return config_from_dict(EvalConfig, settings, str(file)), known


def _claim(
    config: EvalConfig, questions: Mapping[str, Sequence[Question]], output: Path, left_out: Sequence[str]
) -> None:
    """Write the configuration and the environment, or check that the folder holds the same evaluation."""
    texts = {bench: json.dumps([asdict(question) for question in asked]) for bench, asked in questions.items()}
    hashes = {bench: sha256(text.encode()).hexdigest() for bench, text in texts.items()}
    paths = {name: filter(None, (section.path, section.adapter)) for name, section in config.models.items()}
    models = {name: [formats.digest(path) for path in both] for name, both in paths.items()}
    now = environment() | {"questions": hashes, "left_out": list(left_out), "models": models}
    settings = json.loads(json.dumps(asdict(config)))
    if (output / "config.json").exists():
        old_config, old_environment = read_run(output)
        before, old_hashes = json.loads(json.dumps(asdict(old_config))), old_environment["questions"]
        different = [key for key in settings if settings[key] != before[key]]
        different += [f"the questions of {bench}" for bench in hashes if old_hashes.get(bench) != hashes[bench]]
        different += [key for key in ("devices", "processor", "cores", "versions") if old_environment[key] != now[key]]
        stored = old_environment.get("models", models)
        different += [f"contents of {name}" for name, one in models.items() if stored.get(name) != one]
        if different:
            raise ConfigError(
                f"{output}: expected an evaluation with the same {', '.join(different)}, got others. Choose another."
            )
    else:
        write_whole(output / "environment.json", json.dumps(now, indent=2) + "\n")
    write_whole(output / "config.json", json.dumps(settings, indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Return versions, hardware, commit and time, which are needed to reproduce a run."""
    device = jax.devices()[0]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """Return the commit of the source tree; empty for an installed package."""
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip()
