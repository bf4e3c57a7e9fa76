"""Time that the host takes to read a chunk of a streamed answer, by the length of the answer.

    python -m tests.helpers.stream_cost

A tiny random model decodes one serial answer, in chunks of 4 steps. The time is that of taking the tokens and of making
the events, without that of starting steps.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from aspd_jax import load_model
from infer import Engine, SamplingParams
from infer.scheduling.scheduler import Scheduler
from tests.conftest import tiny_config, write_checkpoint
from tests.helpers.byte_tokenizer import train_tokenizer
from tests.helpers.tasks import problem

LENGTHS, CHUNKS, STEPS = (256, 4096, 16_384), 64, 4


def timed(name: str, seconds: Counter[str]) -> None:
    """Add the time of the calls of a method of the scheduler to `seconds`."""
    method: Callable[..., Any] = getattr(Scheduler, name)

    def measured(*args: Any, **options: Any) -> Any:
        before = time.perf_counter()
        result = method(*args, **options)
        seconds[name] += time.perf_counter() - before  # type: ignore[assignment]
        return result

    setattr(Scheduler, name, measured)


def main() -> None:
    """Print the times."""
    seconds = Counter[str]()
    for name in ("_take_tokens", "_process_outputs", "_start"):
        if hasattr(Scheduler, name):
            timed(name, seconds)
    tokenizer = train_tokenizer((problem(seed, False).answer for seed in range(200)), 400)
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        write_checkpoint(Path(folder), config | {"max_position_embeddings": 32_768}, seed=1)
        tokenizer.save_pretrained(folder)
        engine = Engine(load_model(folder), max_length=20_000, max_batch=1)
    end = engine.config.end[0]
    params = SamplingParams(temperature=1.0, max_new_tokens=19_000, logit_bias={end: -100.0})
    handle, decoded = engine.submit("Say:", params, "serial"), 0
    for length in LENGTHS:
        handle.stream = None
        while (left := length - CHUNKS * STEPS // 2 - decoded) > 0:
            engine.step(left)
            decoded = len(handle.partial().token_ids)
        handle.stream = "branches"
        times = []
        for _ in range(CHUNKS):
            seconds.clear()
            engine.step(STEPS)
            times.append(seconds["_take_tokens"] + seconds["_process_outputs"] - seconds["_start"])
        events = handle.poll()
        assert sum(len(event.token_ids) for event in events) > CHUNKS
        decoded = len(handle.partial().token_ids)
        print(f"{length:6} tokens: {1e6 * median(times[4:]):7.0f} us per chunk")


if __name__ == "__main__":
    main()
