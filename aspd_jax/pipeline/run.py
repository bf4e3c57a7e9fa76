"""The pipeline over a source of records: stages that resume, and what they leave (protocol, section 7).

Every stage goes over all answers and stores what it makes of each, with a hash of what it was made of. So a killed run
goes on, a changed setting runs again what depends on it, and replies of the teacher are never asked for twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from tqdm import tqdm

from aspd_jax.endpoint import Unanswered, outside_event_loop
from aspd_jax.errors import ConfigError, DataError, StructureError
from aspd_jax.files import replacing, write_whole
from aspd_jax.pipeline.annotate import annotate, independence
from aspd_jax.pipeline.checks import asked_for, find_dependence, repetition
from aspd_jax.pipeline.config import DataConfig
from aspd_jax.pipeline.extract import propose
from aspd_jax.pipeline.likelihood import encode, rises
from aspd_jax.pipeline.measures import Count, Measures, best, estimate_tokens, measure, saved
from aspd_jax.pipeline.report import Account, Report
from aspd_jax.pipeline.sources import Conversation, Unreadable, read_records
from aspd_jax.pipeline.spans import BlockSpan, blocks_from_json, blocks_to_json, planned_block, structure_of
from aspd_jax.pipeline.teacher import Teacher
from aspd_jax.sizes import next_power
from aspd_jax.store import Store
from aspd_jax.structure import plain_text, to_json

VERSION = 2  # of what stages make; another one runs them again
LEAST_ROW = 256  # tokens of the smallest rows that are scored


class Shard(NamedTuple):
    """Which records are one's own: every `of`-th, beginning with `number`."""

    number: int = 0
    of: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """From `i/n`.

        Raises:
            ConfigError: it is none.
        """
        number, found, of = text.partition("/")
        if not (found and number.isdigit() and of.isdigit() and int(number) < int(of)):
            raise ConfigError(f"--shard takes i/n with i from 0 to n - 1, got {text!r}")
        return Shard(int(number), int(of))

    def name(self, stem: str, suffix: str) -> str:
        """Of a file of this shard."""
        return f"{stem}{suffix}" if self.of == 1 else f"{stem}-{self.number:05d}-of-{self.of:05d}{suffix}"

    def records(self, source: str) -> Iterator[Conversation | Unreadable]:
        """Of this shard."""
        return islice(read_records(source), self.number, None, self.of)


WHOLE = Shard()


class Answer(NamedTuple):
    """An answer to work on: its key in the store, everything said before it, and its text."""

    key: str
    question: str
    text: str


class Outcome(NamedTuple):
    """The report, and how many answers have no reply yet."""

    report: Report
    unanswered: int


class _Candidate(NamedTuple):
    source: str
    blocks: tuple[BlockSpan, ...]


@outside_event_loop
def build(config: DataConfig, source: str, output: Path, shard: Shard = WHOLE, progress: bool = True) -> Outcome:
    """Run all stages; writes `structured.jsonl`, `plain.jsonl`, `rejected.jsonl`, `report.md` and `report.json`.

    Raises:
        AspdError: the source cannot be read, the endpoint refuses, or a setting cannot work.
    """
    store = Store(output / shard.name("work", ".sqlite"))
    try:
        return _Run(config, source, output, shard, store, progress).run()
    finally:
        store.close()


def answers_of(record: Conversation) -> Iterator[tuple[int, Answer]]:
    """Every answer of a conversation with its place, and what was said before."""
    for place in record.answers:
        said = "\n\n".join(f"{content}" for _, content in record.messages[:place])
        yield place, Answer(f"{record.number}/{place}", said, record.messages[place][1])


def counter(folder: str) -> Count:
    """How tokens are counted: as the tokenizer of a model has them, or an estimate where none is named.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    if not folder:
        return estimate_tokens
    from aspd_jax.formats import open_tokenizer

    try:
        tokenizer = open_tokenizer(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{folder} holds no tokenizer that transformers can read: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


class _Run:
    def __init__(
        self, config: DataConfig, source: str, output: Path, shard: Shard, store: Store, progress: bool
    ) -> None:
        self.config, self.source, self.output, self.shard = config, source, output, shard
        self.store, self.progress = store, progress
        self.teacher = Teacher(config.teacher, store) if config.teacher.base_url else None
        self.unanswered: dict[str, str] = {}
        s, teacher = config.select, asdict(config.teacher)
        self.count = counter(config.tokenizer)
        prompts = self.teacher.prompts if self.teacher else {}
        asked = [teacher[name] for name in ("base_url", "model", "temperature", "max_tokens", "attempts")]
        settings = {
            "propose": [
                VERSION,
                config.rules,
                config.titles,
                config.tokenizer,
                s.min_tokens,
                *asked,
                config.teacher.candidates,
                prompts,
            ],
            "score": [config.likelihood.model, config.likelihood.length],
            "judge": [config.check_references, asdict(config.likelihood), asdict(s), config.teacher.votes],
        }
        # Of each stage and all before it.
        whole = hashlib.sha256()
        self._settings: dict[str, str] = {}
        for stage, values in settings.items():
            whole.update(json.dumps(values).encode())
            self._settings[stage] = whole.hexdigest()

    def run(self) -> Outcome:
        total = sum(1 for _ in self.answers())
        asyncio.run(self._ask(total))
        account = Account(*self.store.account(), self.config.teacher.input_price, self.config.teacher.output_price)
        return Outcome(self._write(account), len(self.unanswered))

    def answers(self) -> Iterator[Answer]:
        """Of this shard, those that hold nothing left out."""
        for record in self.shard.records(self.source):
            if isinstance(record, Conversation):
                yield from (answer for _, answer in answers_of(record) if answer.text.strip())

    async def _ask(self, total: int) -> None:
        try:
            await self._stage("propose", self._propose, total)
            if self.config.likelihood.model:
                self._score(total)
            await self._stage("judge", self._judge, total)
        except ExceptionGroup as group:  # several calls may have failed for the same reason
            raise group.exceptions[0] from None
        finally:
            if self.teacher is not None:
                await self.teacher.close()

    def made_of(self, stage: str, answer: Answer) -> str:
        """Hash of everything that a stage's outcome for an answer depends on."""
        what = [self._settings[stage], answer.question, answer.text]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def get(self, stage: str, answer: Answer) -> Any:
        """What a stage has made of an answer, or None."""
        return self.store.get(answer.key, stage, self.made_of(stage, answer))

    def candidates(self, answer: Answer) -> list[_Candidate]:
        """What the first stage has proposed."""
        value = self.get("propose", answer) or {"candidates": []}
        return [_Candidate(c["source"], blocks_from_json(c["blocks"])) for c in value["candidates"]]

    async def _stage(self, name: str, work: Callable[[Answer], Awaitable[Any]], total: int) -> None:
        """Do a stage's work on every answer that it has not been done on, several at a time."""
        left = self.answers()
        workers = self.config.teacher.concurrency if self.teacher else 1
        with tqdm(total=total, desc=name, unit="answer", disable=None if self.progress else True) as bar:

            async def worker() -> None:
                for answer in left:
                    if answer.key not in self.unanswered and self.get(name, answer) is None:
                        try:
                            value = await work(answer)
                        except Unanswered as error:
                            self.unanswered[answer.key] = f"{name}: {error}"
                        else:
                            self.store.put(answer.key, name, self.made_of(name, answer), value)
                    if self.teacher is not None:
                        bar.set_postfix(self.teacher.spent, refresh=False)
                    bar.update()

            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(worker())

    async def _propose(self, answer: Answer) -> dict[str, Any]:
        found: list[_Candidate] = []
        rejected: list[dict[str, str]] = []
        tokens = self.count(answer.text)
        if tokens < self.config.select.min_tokens:
            reason = f"{tokens} tokens, fewer than select.min_tokens ({self.config.select.min_tokens})"
            return {"candidates": [], "rejected": [{"stage": "short", "source": "", "reason": reason}]}
        if self.config.rules:
            found += [_Candidate(f"form {n}", blocks) for n, blocks in enumerate(propose(answer.text), 1)]
        if self.teacher is not None and self.config.teacher.candidates:
            made, reasons = await annotate(self.teacher, answer.question, answer.text)
            rejected += [{"stage": "annotate", "source": "teacher", "reason": reason} for reason in reasons]
            found += [_Candidate(f"teacher {n}", blocks) for n, blocks in enumerate(made, 1)]
        kept: list[dict[str, Any]] = []
        plan = self.config.titles == "plan"
        for candidate in found:
            try:
                structure = structure_of(answer.text, candidate.blocks)
                if plain_text(structure) != answer.text:
                    raise StructureError("its plain text is not the answer")
            except StructureError as error:
                rejected.append({"stage": "integrity", "source": candidate.source, "reason": str(error)})
                continue
            blocks = [planned_block(block) for block in candidate.blocks] if plan else candidate.blocks
            kept.append(candidate._asdict() | {"blocks": blocks_to_json(blocks)})
        return {"candidates": kept, "rejected": rejected}

    def _score(self, total: int) -> None:
        """Score all candidates, rows of like length together."""
        from aspd_jax.language_model import load_model

        waiting: dict[int, list[Any]] = defaultdict(list)
        lm: Any = None
        length = self.config.likelihood.length
        with tqdm(total=total, desc="score", unit="answer", disable=None if self.progress else True) as bar:

            def flush(size: int) -> None:
                rows = [row for _, _, _, row in waiting[size]]
                filled = [*rows, *[rows[-1]] * (self.config.likelihood.batch - len(rows))]
                for (answer, number, scores, _), of_row in zip(waiting[size], rises(lm, filled, size), strict=False):
                    scores[number] = [list(rise) for rise in of_row]
                    self._store_scores(answer, scores)
                waiting[size] = []

            for answer in self.answers():
                bar.update()
                if answer.key in self.unanswered or self.get("score", answer) is not None:
                    continue
                candidates = self.candidates(answer)
                blocks = [block for candidate in candidates for block in candidate.blocks]
                if all(self._check(answer, block, None) for block in blocks):
                    continue  # none of them can be selected, whatever a model says
                scores: list[Any] = [None] * len(candidates)
                rows = []
                for number, candidate in enumerate(candidates):
                    lm = lm or load_model(self.config.likelihood.model)
                    row = encode(lm, answer.question, answer.text, candidate.blocks)
                    if len(row.tokens) > length:
                        scores[number] = f"{len(row.tokens)} tokens, likelihood.length is {length}"
                    else:
                        rows.append((number, row))
                self._store_scores(answer, scores)
                for number, row in rows:
                    size = max(LEAST_ROW, next_power(len(row.tokens)))
                    waiting[size].append((answer, number, scores, row))
                    if len(waiting[size]) == self.config.likelihood.batch:
                        flush(size)
            for size in sorted(size for size, rows in waiting.items() if rows):
                flush(size)

    def _store_scores(self, answer: Answer, scores: Sequence[Any]) -> None:
        if all(score is not None for score in scores):
            self.store.put(answer.key, "score", self.made_of("score", answer), scores)

    async def _judge(self, answer: Answer) -> list[list[dict[str, str] | None]]:
        """For every block of every candidate, the stage that it fails at and why; None: it passes."""
        candidates = self.candidates(answer)
        scores = self.get("score", answer) if self.config.likelihood.model else None
        verdicts = []
        for number, candidate in enumerate(candidates):
            failed: list[dict[str, str] | None] = []
            first = 0
            for block in candidate.blocks:
                of_block = None if scores is None else scores[number]
                if isinstance(of_block, list):
                    of_block = of_block[first : first + len(block.branches)]
                first += len(block.branches)
                failed.append(self._check(answer, block, of_block))
            left = [place for place, failure in enumerate(failed) if failure is None]
            if left and self.teacher is not None and self.config.teacher.votes:
                blocks = [candidate.blocks[place] for place in left]
                try:
                    votes = await independence(self.teacher, answer.question, answer.text, blocks)
                    failures = [None if v.in_favour else {"stage": "vote", "reason": v.reason} for v in votes]
                except DataError as error:
                    failures = [{"stage": "vote", "reason": str(error)}] * len(left)
                for place, failure in zip(left, failures, strict=True):
                    failed[place] = failure
            verdicts.append(failed)
        return verdicts

    def _check(self, answer: Answer, block: BlockSpan, scores: Any) -> dict[str, str] | None:
        """What costs nothing: rules, likelihood, and whether the block saves anything."""
        select, likelihood = self.config.select, self.config.likelihood
        if len(block.branches) > select.max_branches:
            reason = f"{len(block.branches)} branches, select.max_branches is {select.max_branches}"
            return {"stage": "select", "reason": reason}
        gain = saved(answer.text, block, self.count)
        if gain < select.min_saved:
            return {"stage": "select", "reason": f"it saves {gain} passes, select.min_saved is {select.min_saved}"}
        if self.config.check_references and (why := find_dependence(answer.question, answer.text, block)):
            return {"stage": "check", "reason": why}
        if isinstance(scores, str):
            return {"stage": "likelihood", "reason": scores}
        for branch, (mean, peak) in zip(block.branches, scores or [], strict=False):
            for name, value, most in (("mean", mean, likelihood.mean_rise), ("peak", peak, likelihood.peak_rise)):
                if value > most:
                    reason = (
                        f"{branch.title!r}: {name} rise of {value:.2f} nats a token, likelihood.{name}_rise is {most}"
                    )
                    return {"stage": "likelihood", "reason": reason}
        return None

    def _write(self, account: Account) -> Report:
        """The sets, what was left out and why, and the report; each file whole or not at all."""
        report = Report(account)
        names = ("structured", "plain", "rejected")
        files = {name: self.output / self.shard.name(name, ".jsonl") for name in names}
        with ExitStack() as stack:
            handles = {name: stack.enter_context(replacing(file)) for name, file in files.items()}

            def put(name: str, value: dict[str, Any]) -> None:
                handles[name].write(json.dumps(value, ensure_ascii=False) + "\n")

            kept = self._share_of_serial()
            for record in self.shard.records(self.source):
                report.records += 1
                if isinstance(record, Unreadable):
                    report.unreadable += 1
                    put("rejected", {"id": record.id, "line": record.number, "stage": "read", "reason": record.reason})
                    continue
                self._write_record(record, report, put, kept)
        for suffix, text in ((".json", json.dumps(report.as_dict(), indent=1)), (".md", report.markdown())):
            write_whole(self.output / self.shard.name("report", suffix), text)
        return report

    def _share_of_serial(self) -> float:
        """Of the records without a block, the share that `select.serial_ratio` leaves."""
        if not self.config.select.serial_ratio:
            return 1.0
        records = (r for r in self.shard.records(self.source) if isinstance(r, Conversation) and not self._unfit(r))
        forked = Counter(
            any(self._select(answer, Report(Account()))[0] for _, answer in answers_of(record)) for record in records
        )
        return self.config.select.serial_ratio * forked[True] / max(1, forked[False])

    def _write_record(
        self, record: Conversation, report: Report, put: Callable[[str, dict[str, Any]], None], kept: float
    ) -> None:
        base = {"id": record.id, "line": record.number}
        missing = [self.unanswered[a.key] for _, a in answers_of(record) if a.key in self.unanswered]
        if missing:
            report.unanswered += 1
            put("rejected", base | {"stage": "teacher", "reason": missing[0]})
            return
        if unfit := self._unfit(record):
            report.unfit += 1
            put("rejected", base | {"stage": "record", "reason": unfit})
            return
        plain: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in record.messages]
        structured = list(plain)
        details, forked = [], False
        for place, answer in answers_of(record):
            blocks, detail = self._select(answer, report)
            forked |= bool(blocks)
            for rejection in detail["rejected"]:
                put("rejected", base | {"message": place} | rejection)
            structure = to_json(structure_of(answer.text, blocks))
            structured[place] = {"role": "assistant", "structure": structure}
            details.append({"message": place} | detail)
        if not forked and crc32(json.dumps(plain).encode()) >= kept * (1 << 32):
            report.spared += 1
            return
        put("plain", base | {"messages": plain})
        put("structured", base | {"messages": structured, "pipeline": details})

    def _unfit(self, record: Conversation) -> str | None:
        """Why a record belongs into neither set, whatever structure it has."""
        select = self.config.select
        for _, answer in answers_of(record):
            if (repeated := repetition(answer.text)) > select.max_repetition:
                return (
                    f"{repeated:.0%} of its words repeat what it said before, at most {select.max_repetition:.0%} may"
                )
            if select.as_asked and (asked := asked_for(answer.question)):
                sizes = {len(block.branches) for candidate in self.candidates(answer) for block in candidate.blocks}
                if sizes and asked not in sizes:
                    return f"its question asks for {asked}, and its blocks have {', '.join(map(str, sorted(sizes)))}"
        return None

    def _select(self, answer: Answer, report: Report) -> tuple[tuple[BlockSpan, ...], dict[str, Any]]:
        """The best of what survives of an answer's candidates, and where the rest failed."""
        proposed = self.get("propose", answer) or {"rejected": []}
        rejected = list(proposed["rejected"])
        verdicts = self.get("judge", answer) or []
        scores = self.get("score", answer) or [] if self.config.likelihood.model else []
        report.rises += [rise for of_candidate in scores if isinstance(of_candidate, list) for rise in of_candidate]
        surviving: list[tuple[BlockSpan, ...]] = []
        candidates = self.candidates(answer)
        for candidate, failures in zip(candidates, verdicts, strict=True):
            both = list(zip(candidate.blocks, failures, strict=True))
            surviving.append(tuple(block for block, failure in both if failure is None))
            for block, failure in both:
                if failure is not None:
                    where = {"source": candidate.source, "start": block.start, "end": block.end}
                    rejected.append(failure | where | {"titles": [branch.title for branch in block.branches]})
        measures = [measure(answer.text, blocks, self.count) for blocks in surviving]
        chosen = best(measures)
        blocks = () if chosen is None else surviving[chosen]
        of_answer: Measures = measure(answer.text, blocks, self.count)
        report.add(of_answer, [c.source for c in candidates], rejected, sum(len(c.blocks) for c in candidates))
        detail: dict[str, Any] = {
            "source": "" if chosen is None else candidates[chosen].source,
            "measures": of_answer._asdict() | {"ideal_speedup": round(of_answer.ideal_speedup, 3)},
            "rejected": rejected,
        }
        return blocks, detail
