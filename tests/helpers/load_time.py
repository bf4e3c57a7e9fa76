"""Print how long each part of loading a GGUF model takes: `python -m tests.helpers.load_time MODEL.gguf`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import TypeVar

import gguf  # noqa: F401 (imports are not measured)
from transformers import PreTrainedTokenizerFast  # noqa: F401

from aspd_jax import load_model
from aspd_jax.formats import find_model, open_checkpoint
from aspd_jax.formats.gguf_file import open_gguf_file

Result = TypeVar("Result")


def timed(name: str, function: Callable[[], Result]) -> Result:
    """Call a function and print its wall and CPU time."""
    wall, cpu = perf_counter(), process_time()
    result = function()
    print(f"{name:42} {perf_counter() - wall:6.2f} s, of the CPU {process_time() - cpu:6.2f} s", flush=True)
    return result


def main(model: str) -> None:
    file = find_model(model)
    _, tensors = timed("metadata and tensor descriptions", lambda: open_gguf_file(Path(file)))
    timed("all tensors, read and dequantised", lambda: sum(tensor.values().size for tensor in tensors.values()))
    timed("metadata, configuration and tokenizer", lambda: open_checkpoint(file))
    lm = timed("load_model: all of this, with parameters", lambda: load_model(file))
    timed("codec", lambda: lm.codec)
    timed("grammars (first structured request)", lambda: lm.codec.text.token_bytes([0]))


if __name__ == "__main__":
    main(sys.argv[1])
