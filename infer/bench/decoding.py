"""What whole answers of a given structure cost, serial mode beside adaptive mode.

Both modes are the engine's own, with the same weights, in turn in one run. Structure is scripted, so that lengths are
exact; everything else, sampling included, is computed as always.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median
from typing import Any

import jax

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from infer.answers.answer import Result
from infer.bench.passes import random_prompt
from infer.engine import NO_TOKENS, Engine
from infer.request import Mode, SamplingParams

SERIAL_TEXT = 32  # tokens before and after the block together
TITLE = 2  # tokens of a title
SEPARATOR = (1,)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerTime:
    """Whole answers of one structure, by one engine and mode; medians over runs.

    Attributes:
        name: `adaptive`, `serial` or `transformers`.
        draft_tokens: guesses per segment and pass; 0: none.
        branches, length: of the block; length counts head and closing tag. 0 branches: no block.
        content, raw: tokens of an answer.
        passes: forward passes after prefill.
        seconds: from request to last token, median; `fastest` and `slowest` run. Of a batch: until all have ended.
        latency: seconds of one request, median over requests.
        first_token: seconds until the first token.
        ideal: content tokens by critical path.
        compile_seconds: the first run's time beyond the median.
    """

    name: str
    draft_tokens: int
    batch: int
    branches: int
    length: int
    content: int
    raw: int
    passes: int
    seconds: float
    fastest: float
    slowest: float
    latency: float
    first_token: float
    ideal: float
    compile_seconds: float


def scripted_answer(
    lm: LanguageModel, branches: int, length: int, text: int, copied: Sequence[int] = ()
) -> list[list[int]]:
    """What an answer samples, as `SamplingParams.script` has it.

    Args:
        branches: 0: no block.
        length: tokens of a branch, head and closing tag included.
        text: serial text, half of it before the block.
        copied: what the answer says, over and over; empty: random tokens.
    """
    special = lm.special_tokens or NO_TOKENS
    tokens = cycle(copied) if copied else iter(random_prompt(lm, text + branches * (TITLE + length), seed=1))
    serial = [next(tokens) for _ in range(text // 2 if branches else text)]
    for _ in range(branches):
        serial += [special.title_start, *(next(tokens) for _ in range(TITLE)), special.title_end]
    if branches:
        serial.append(special.parallel_start)
        serial += [next(tokens) for _ in range(text - text // 2)]
    head = 1 + TITLE + len(SEPARATOR)
    written = [[*(next(tokens) for _ in range(length - head - 1)), special.branch_end] for _ in range(branches)]
    return [[*serial, *lm.end_ids[:1]], *written]


def answer_times(
    lm: LanguageModel,
    branches: int,
    length: int,
    context: int,
    batch: int = 1,
    repeats: int = 5,
    draft_tokens: int = 0,
) -> list[AnswerTime]:
    """Time answers with a block of so many branches, and serial answers of as many content tokens, in turn.

    Args:
        draft_tokens: also time both with so many guesses. Answers then copy the prompt: guesses are at their best.

    Raises:
        RequestError: a branch is too short for its head.
    """
    head = 1 + TITLE + len(SEPARATOR)
    if branches < 2 or length < head + 2:
        raise RequestError(f"an answer needs 2 branches of at least {head + 2} tokens, got {branches} of {length}")
    copied = random_prompt(lm, context) if draft_tokens else ()
    adaptive = scripted_answer(lm, branches, length, SERIAL_TEXT, copied)
    content = SERIAL_TEXT + branches * (length - head - 1)
    raw = len(adaptive[0]) + branches * length + 1
    engines = {
        guesses: Engine(
            lm,
            max_length=context + raw + 4 * branches + 8,  # the grammar's reserve
            max_batch=batch,
            max_branches=branches,
            max_title_tokens=TITLE,
            separator_ids=SEPARATOR,
            reuse=False,
            draft_tokens=guesses,
        )
        for guesses in sorted({0, draft_tokens})
    }
    scripts: dict[Mode, Sequence[Sequence[int]]] = {
        "adaptive": adaptive,
        "serial": scripted_answer(lm, 0, length, content, copied),
    }
    prompts = [random_prompt(lm, context, 0 if copied else seed) for seed in range(batch)]
    params = SamplingParams(max_new_tokens=raw + 4 * branches + 8, max_branch_tokens=length)
    kinds = [(mode, guesses) for mode in scripts for guesses in engines]
    seconds: dict[tuple[Mode, int], list[float]] = {kind: [] for kind in kinds}
    results: dict[tuple[Mode, int], list[Result]] = {kind: [] for kind in kinds}
    for repeat in range(repeats + 1):
        for mode, guesses in kinds:
            told = replace(params, script=scripts[mode])
            begun = time.perf_counter()
            answers = engines[guesses].generate(prompts, told, mode)
            seconds[mode, guesses].append(time.perf_counter() - begun)
            results[mode, guesses] += answers if repeat else []
            if any(answer.stats.content_tokens != content for answer in answers):
                raise RequestError("the script was not followed; this is a mistake of the benchmark")
    found = []
    for mode, guesses in kinds:
        first, *measured = seconds[mode, guesses]
        stats = [result.stats for result in results[mode, guesses]]
        found.append(
            AnswerTime(
                name=mode,
                draft_tokens=guesses,
                batch=batch,
                branches=branches if mode == "adaptive" else 0,
                length=length if mode == "adaptive" else 0,
                content=content,
                raw=stats[0].generated_tokens,
                passes=stats[0].passes,
                seconds=median(measured),
                fastest=min(measured),
                slowest=max(measured),
                latency=median(s.seconds["total"] for s in stats),
                first_token=median(s.seconds["first_token"] for s in stats),
                ideal=stats[0].ideal_speedup,
                compile_seconds=max(0.0, first - median(measured)),
            )
        )
    return found


def transformers_time(lm: LanguageModel, content: int, context: int, batch: int, repeats: int) -> AnswerTime | None:
    """`transformers`' own greedy generate, for a random Llama of the same shape.

    Returns:
        None where torch is not installed, does not see the device that JAX works on, or finds too little memory there.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    of = lm.config
    shape = LlamaConfig(
        vocab_size=of.vocab_size,
        hidden_size=of.hidden_size,
        intermediate_size=of.feed_forward,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        head_dim=of.head_dim,
        max_position_embeddings=context + content,
        tie_word_embeddings=of.tied,
        eos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (jax.default_backend() == "cpu") != (device == "cpu"):
        return None
    model: Any = None
    usual, times = torch.get_default_dtype(), []
    try:
        torch.set_default_dtype(getattr(torch, of.dtype))
        with torch.device(device):
            model = LlamaForCausalLM(shape).eval()
        prompts = torch.tensor([random_prompt(lm, context, seed) for seed in range(batch)], device=device)
        with torch.inference_mode():
            for _ in range(repeats + 1):
                begun = time.perf_counter()
                model.generate(prompts, max_new_tokens=content, min_new_tokens=content, do_sample=False)
                times.append(time.perf_counter() - begun)
    except torch.OutOfMemoryError:
        log.warning("no figures of transformers at batch %d: JAX leaves it too little memory", batch)
        return None
    finally:
        torch.set_default_dtype(usual)
        del model
        torch.cuda.empty_cache()
    first, *measured = times
    middle = median(measured)
    return AnswerTime(
        "transformers", 0, batch, 0, 0, content, content, content - 1, middle, min(measured), max(measured), middle,
        float("nan"), 1.0, max(0.0, first - middle),
    )  # fmt: skip


ANSWER_HEAD = (
    "| batch | answer | content tokens | passes | s (median) | fastest - slowest | content tokens/s | raw tokens/s "
    "| latency, ms | first token, ms | ideal | realised | efficiency | compiling, s |\n" + "|---" * 14 + "|"
)


def answer_rows(pair: Sequence[AnswerTime]) -> str:
    """Markdown, below `ANSWER_HEAD`: answers of as many content tokens; the serial one is the baseline."""
    lines = []
    serial = next(r for r in pair if r.name == "serial" and not r.draft_tokens)
    for r in pair:
        realised = serial.seconds / r.seconds
        what = f"{r.branches} branches of {r.length}" if r.branches else r.name
        what += f", {r.draft_tokens} guesses" if r.draft_tokens else ""
        cells = [
            str(r.batch),
            what,
            str(r.content),
            str(r.passes),
            f"{r.seconds:.3f}",
            f"{r.fastest:.3f} - {r.slowest:.3f}",
            f"{r.batch * r.content / r.seconds:.0f}",
            f"{r.batch * r.raw / r.seconds:.0f}",
            f"{1000 * r.latency:.0f}",
            f"{1000 * r.first_token:.1f}",
            f"{r.ideal:.2f}x",
            f"{realised:.2f}x",
            f"{realised / r.ideal:.2f}",
            f"{r.compile_seconds:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def published(shape: str, dtype: str, context: int) -> str:
    """What the authors' engine and `transformers` reach on one shape, if it is this one: raw tokens per second on 2
    cores (AMD EPYC), torch 2.13, float32, batch 1, prompt 128; medians of 6 runs.
    """
    if (shape, dtype, context) != ("27m", "float32", 128):
        return ""
    rows: dict[str, Any] = {
        "transformers generate, 512 tokens": (106, ""),
        "authors' engine, serial, 512 tokens": (103, "1.00x"),
        "authors' engine, 2 branches of 240": (154, "1.49x of 1.86x"),
        "authors' engine, 4 branches of 120": (243, "2.37x of 3.14x"),
        "authors' engine, 8 branches of 60": (351, "3.41x of 4.38x"),
        "authors' engine, 16 branches of 30": (380, "3.69x of 4.56x"),
    }
    lines = ["| published for this shape | raw tokens/s | speed-up, of ideal (raw) |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {speed} | {of} |" for name, (speed, of) in rows.items()])
