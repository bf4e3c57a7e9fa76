"""A server under load, simulated: the engine's own scheduler and programs, by a clock that passes move.

The model has one layer of width 8 and computes next to nothing. Scripts say what it writes, so prompts, blocks and
branches are as long as those of real answers, and a pass takes what a cost says: measured on this machine, or computed
from programs for a chip that is not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from aspd_jax.chat import encode_turns
from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel, random_model
from aspd_jax.model.config import ModelConfig
from aspd_jax.pipeline.show import read_structured
from aspd_jax.structure import Parallel, Structure
from aspd_jax.tokens import SpecialTokens
from infer.bench.load import Load, Outcome, load_of
from infer.decode.state import EngineConfig
from infer.decode.step import Report
from infer.engine import Engine
from infer.request import Mode, SamplingParams
from infer.scheduling.admission import new_state
from infer.scheduling.handle import Handle
from infer.scheduling.policy import Sample, StepCost, fit
from infer.scheduling.runner import Run, Runner
from infer.scheduling.warm_up import measure_cost

VOCABULARY = 64
END, SEPARATOR, WORD = 0, 1, 2  # ids of the model that is simulated with
FIRST_TITLE = 8  # title n is spelt with the id FIRST_TITLE + n: no two titles of a block are alike
SPECIAL = SpecialTokens(*range(VOCABULARY - 6, VOCABULARY))
MOST_TITLE_TOKENS = 24
MOST_BRANCHES = 16
CHUNK = 0.03  # seconds between two looks of a server at growing answers


@dataclass(frozen=True)
class AnswerShape:
    """How long the parts of a question and its answer are, in tokens.

    Attributes:
        prompt: the question, in its chat template.
        before, after: serial text around the block.
        branches: title and text of each; empty: the answer has no block.
    """

    prompt: int
    before: int
    branches: tuple[tuple[int, int], ...]
    after: int

    @property
    def content(self) -> int:
        """Tokens of plain text."""
        return self.before + sum(text for _, text in self.branches) + self.after

    @property
    def raw(self) -> int:
        """Tokens of the linearisation, end of text included."""
        titles = sum(2 + title for title, _ in self.branches)
        heads = sum(3 + title for title, _ in self.branches)
        return self.content + titles + heads + 2 * bool(self.branches) + 1

    def script(self, mode: Mode) -> list[list[int]]:
        """See `SamplingParams.script`."""
        if mode == "serial" or not self.branches:
            return [[WORD] * self.content + [END]]
        serial = [WORD] * self.before
        for number, (title, _) in enumerate(self.branches):
            serial += [SPECIAL.title_start, *[FIRST_TITLE + number] * title, SPECIAL.title_end]
        serial += [SPECIAL.parallel_start, *[WORD] * self.after, END]
        return [serial, *([*[WORD] * text, SPECIAL.branch_end] for _, text in self.branches)]


def shapes_of(lm: LanguageModel, file: Path, most: int) -> list[AnswerShape]:
    """Shapes of the first question and answer of each conversation of a file of `aspd data build`, of `most` of them,
    as a model's tokenizer counts them.

    Of several blocks, the largest is kept; the others count as serial text.

    Raises:
        DataError: line and problem.
        RequestError: the file holds no answers, or the model has no tokenizer.
    """
    if lm.tokenizer is None:
        raise RequestError("answers are counted in tokens, and this model has no tokenizer")
    found = []
    for record in islice(read_structured(file, []), most):
        place, items = next(answer for answer in record["answers"] if answer[0])
        prompt, *_ = encode_turns(lm.tokenizer, lm.codec.text, lm.end_ids, record["messages"][:place], prompt=True)
        found.append(_shape(lm, len(prompt), items))
    if not found:
        raise RequestError(f"{file} holds no answers")
    return found


def _shape(lm: LanguageModel, prompt: int, items: Structure) -> AnswerShape:
    def count(text: str) -> int:
        return len(lm.codec.text.encode(text))

    blocks = [(len(item.branches), place) for place, item in enumerate(items) if isinstance(item, Parallel)]
    chosen = max(blocks, default=(0, len(items)))[1]
    around = [0, 0]
    branches: tuple[tuple[int, int], ...] = ()
    for place, item in enumerate(items):
        if place == chosen and isinstance(item, Parallel):
            titles = [min(MOST_TITLE_TOKENS, count(branch.title)) for branch in item.branches[:MOST_BRANCHES]]
            texts = [count(branch.text) for branch in item.branches]
            branches = tuple(zip(titles, texts, strict=False))
            around[1] += sum(texts[MOST_BRANCHES:])
        else:
            parts = [branch.text for branch in item.branches] if isinstance(item, Parallel) else [item.text]
            around[place > chosen] += sum(map(count, parts))
    return AnswerShape(prompt, around[0], branches, around[1])


def measured_cost(lm: LanguageModel, rows: int, max_length: int) -> StepCost:
    """What a pass of a model costs on this machine; some six programs are compiled for it."""
    engine = Engine(lm, max_length=max_length, max_batch=rows)
    buckets = engine.scheduler.runner.buckets
    return measure_cost(lm, engine.config, new_state(lm, engine.config, rows, buckets.capacity), buckets)[1]


def computed_cost(record: Mapping[str, Any]) -> StepCost:
    """What a pass costs at least, fitted to what `aspd compile decode --json` wrote.

    Raises:
        RequestError: too few programs, or one that does not fit the chip.
    """
    passes = record.get("passes", [])
    samples = [
        Sample(of["width"] * of["batch"], of["batch"] * of["slots"], of["figures"]["milliseconds"])
        for of in passes
        if of["figures"]["milliseconds"] is not None
    ]
    if len({sample.tokens for sample in samples}) < 2 or len({sample.context for sample in samples}) < 2:
        raise RequestError("a cost needs passes of two widths and two sizes of the cache that fit the chip")
    return fit(samples)


class _TimedRunner(Runner):
    """Passes that take what a cost says, by a clock of their own."""

    def __init__(self, lm: LanguageModel, config: EngineConfig, rows: int, capacity: int, cost: StepCost) -> None:
        super().__init__(lm, config, rows, capacity)
        self.cost, self.seconds = cost, 0.0
        self.clock = lambda: self.seconds

    def end(self, started: Run, cost: StepCost | None) -> tuple[int, Report]:
        done, report = super().end(started, cost)
        bucket = started.bucket
        self.seconds += done * self.cost.milliseconds(bucket.tokens, bucket.rows * bucket.slots) / 1000
        return done, report


class Simulation:
    """A server of so many rows, whose passes cost so much.

    Args:
        shapes: of the answers that it will give.
        policy: see `infer.scheduling.policy.Policy`.
    """

    def __init__(self, shapes: Sequence[AnswerShape], rows: int, cost: StepCost, policy: str = "all") -> None:
        config = ModelConfig(
            vocab_size=VOCABULARY, hidden_size=8, feed_forward=8, layers=1, heads=1, kv_heads=1, head_dim=8
        )
        lm = random_model(config, None, {"max_position_embeddings": 1 << 20}, end_ids=(END,))
        lm.special_tokens = SPECIAL
        self._shapes, self._rows, self._policy = shapes, rows, policy
        self._room = 4 * MOST_BRANCHES + 8  # the grammar's reserve
        self._engine = Engine(
            lm,
            max_length=max(shape.prompt + shape.raw for shape in shapes) + self._room,
            max_batch=rows,
            max_branches=MOST_BRANCHES,
            max_title_tokens=MOST_TITLE_TOKENS,
            separator_ids=(SEPARATOR,),
            branch_policy=policy,
            reuse=False,
        )
        scheduler = self._engine.scheduler
        capacity = scheduler.runner.buckets.capacity
        self._runner = scheduler.runner = _TimedRunner(lm, self._engine.config, rows, capacity, cost)
        scheduler.cost = cost

    def _submit(self, shape: AnswerShape, mode: Mode, due: float) -> Handle:
        longest = max((title + text for title, text in shape.branches), default=0)
        budget = shape.raw + self._room
        params = SamplingParams(max_new_tokens=budget, max_branch_tokens=longest + 4, script=shape.script(mode))
        handle = self._engine.submit([WORD] * shape.prompt, params, mode)
        handle.submitted = handle.counted = due
        handle.stream = "branches"  # clients have their answers streamed
        return handle

    def load(self, mode: Mode, rate: float, requests: int, target: float, seed: int = 0) -> Load:
        """Requests that arrive at random at a rate per second, as `infer.bench.load.load` sends them.

        Args:
            target: seconds to the last token that are in time.
        """
        chance, runner = Random(seed), self._runner
        runner.seconds = due = 0.0
        coming: deque[tuple[float, AnswerShape]] = deque()
        for number in range(requests):
            due += chance.expovariate(rate)
            coming.append((due, self._shapes[number % len(self._shapes)]))
        handles: list[Handle] = []
        per_pass = CHUNK
        while True:
            while coming and coming[0][0] <= runner.seconds:
                due, shape = coming.popleft()
                handles.append(self._submit(shape, mode, due))
            if self._engine.step(max(1, round(CHUNK / per_pass))):
                passes, seconds = self._engine.scheduler.chunk
                per_pass = seconds / passes if passes else per_pass
            elif coming:
                runner.seconds = coming[0][0]
            else:
                break
        stats = [handle.result.stats for handle in handles if handle.result is not None]
        outcomes = [
            Outcome("answered", of.seconds["first_token"], of.seconds["total"], of.content_tokens, of.ideal_speedup)
            for of in stats
        ]
        name = mode if self._policy == "all" or mode == "serial" else f"{mode}, {self._policy}"
        return load_of(name, rate, outcomes, target, runner.seconds, self._rows)
