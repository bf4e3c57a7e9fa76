"""Lists in parallel: decisions for a simulated device and model, and SmolLM2's lists against serial decoding."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from aspd_jax import load_model
from aspd_jax.errors import CheckpointError
from aspd_jax.lists import begins_item
from aspd_jax.structure import Parallel, plain_text
from aspd_jax.tokens import Codec, SerialIds, TextCodec
from infer import Engine, SamplingParams
from infer.answers.answer import RequestOutput
from infer.answers.events import Event, EventReader
from infer.control.lists import Lists
from infer.control.masks import permits
from infer.decode.checking import Check
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, NO_LIMIT, RUNNING, STOP, EngineConfig
from infer.decode.token_classes import ITEM, LINE_OPENER, LINE_START, LINES, OPENER, TokenClasses, token_classes
from infer.request import Request
from tests.conftest import shared
from tests.helpers.lists import lists_of

BASE = 7  # position of the first token of the answer
CHECKED = 24  # maximum tokens of a check: less than an item has

BODIES = {
    "Walks": " They clear the head.",
    "Sleep": " Seven hours\n   - in the dark\n   - and in the cold.",
    "Food": " Eat slowly.",
    "Music": " Listen to it.",
    **dict.fromkeys(("Reading", "Writing", "Running"), " Take your time, and let nobody tell you what to do." * 3),
}


MARKER = re.compile(r"^(\d+)\. \*\*", re.MULTILINE)


def model(*leads: str, kept: int = 9, opening: str = "Tips:\n\n") -> Callable[[str, str], str]:
    """Return a model: a function from serial text and text of the branch to the text that it writes next.

    Args:
        leads: leads that it writes, one after the other; it repeats the last one.
        kept: number of items after which it ends a list.
        opening: text before the list.
    """

    def writes(serial: str, branch: str) -> str:
        context = serial + branch
        if len(context) < len(opening):
            return opening[len(context) :]
        items, line = list(MARKER.finditer(context)), context.rpartition("\n")[2]
        is_marker = line[:1].isdigit() and not MARKER.match(line)
        if not items or is_marker or context.endswith("\n\n"):
            goes_on = len(items) < min(kept, len(leads)) or is_marker
            return f"{len(items) + 1}. **"[len(line) :] if goes_on else "Good luck."
        if line and "Good luck.".startswith(line):
            return "Good luck."[len(line) :] or "<end>"
        begun = context[items[-1].end() :]
        names = [leads[min(len(items), len(leads)) - 1], *leads]
        whole = next(text for name in names if (text := f"{name}**:{BODIES[name]}").startswith(begun[: len(text)]))
        return whole[len(begun) :] or "\n\n"[len(begun) - len(whole) :]

    return writes


@dataclass
class Device:
    """A device that decodes one sequence as its controller says, one token per segment and step.

    `limit` bounds the sampled tokens of a branch, whose last one is `closing` there: an end of text or a closing tag.
    """

    codec: TextCodec
    classes: TokenClasses
    writes: Callable[[str, str], str]
    controller: Lists
    config: EngineConfig
    budget: int
    end: int
    limit: int
    closing: int
    serial: list[int] = field(default_factory=list)
    branches: dict[int, list[int]] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    sampled: dict[int, int] = field(default_factory=dict)  # tokens of each branch
    left: dict[int, int] = field(default_factory=dict)
    stops: dict[int, int] = field(default_factory=dict)
    known: bool = True  # whether no sampled token is before the next one
    tokens_left: int = 0
    finish: int = RUNNING
    steps: int = 0
    decisions: list[RowGuidance] = field(default_factory=list)

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.finish,
            untagged=True,
            serial_ids=self.serial,
            branch_ids=tuple(self.branches.values()),
            position=BASE + len(self.serial) - 1,
            tokens_left=self.tokens_left,
            content_left=self.tokens_left,
        )

    def ids(self, output: RequestOutput) -> list[int]:
        return output.token_ids(self.config)

    def apply(self, guidance: RowGuidance) -> None:
        self.decisions.append(guidance)
        if guidance.resume_at >= 0:
            assert guidance.text or guidance.known_tokens or guidance.finish, "something has to be fed next"
            self.serial = self.serial[: guidance.resume_at - BASE]
            self.branches, self.live = {}, set()
        self.tokens_left -= guidance.spent
        self.serial += guidance.text
        assert not (guidance.known_tokens.get(0) and guidance.counted)
        self.serial += guidance.known_tokens.get(0, ())
        self.known = self.known or bool(guidance.text)
        self.left = {**dict.fromkeys(self.left, NO_LIMIT), **guidance.left}
        self.stops |= guidance.stops
        self.masks = {segment: mask[0] for segment, mask in guidance.masks.items() if mask}
        if guidance.branches:
            self.branches = {number: list(guidance.known_tokens[number]) for number in range(1, guidance.branches + 1)}
            self.live, self.sampled = set(self.branches), dict.fromkeys(self.branches, 0)
        for number in guidance.closed:
            self.live.discard(number)
        self.finish = guidance.finish or self.finish

    def check(self, check: Check) -> None:
        """Feed the tokens of a check, and take what is known or sampled behind each, up to the first difference."""
        assert self.serial[-1] == check.tokens[0], "the first token is the pending one"
        assert len(check.tokens) <= min(CHECKED, self.tokens_left), "a check fits the program and the budget"
        for known, draft in zip(check.known, [*check.tokens[1:], check.last], strict=True):
            if known and draft >= 0:
                self.serial.append(draft)
                self.tokens_left -= 1
                continue
            self.sample(0)
            if self.serial[-1] != draft or self.finish != RUNNING:
                break

    def sample(self, segment: int) -> bool:
        """Sample a token of a segment; return whether it waits then."""
        serial, branch = self.codec.decode(self.serial), self.codec.decode(self.branches.get(segment, []))
        text = self.writes(serial, branch)
        token = self.end if text.startswith("<end>") else self.codec.byte_tokens.encode(text.partition("<")[0])[0]
        mask = self.masks.get(segment)
        if mask is not None and not permits(mask, token):
            token = next(token for token in range(mask.size * 32) if permits(mask, token))
        written = self.branches[segment] if segment else self.serial
        if segment:
            self.sampled[segment] += 1
            token = self.closing if self.sampled[segment] == self.limit else token
        begins_line = self.known or bool(LINES >> int(self.classes.kind[written[-1]]) & 1)
        self.known = self.known and segment > 0
        written.append(token)
        self.tokens_left -= 1
        if not segment and token == self.end:
            self.finish = STOP
        elif not segment and self.tokens_left <= 0:
            self.finish = LENGTH
        self.left[segment] = self.left.get(segment, NO_LIMIT) - 1
        kind, stops = int(self.classes.kind[token]), self.stops.get(segment, 0)
        item = kind == LINE_OPENER or (kind == OPENER and begins_line)
        starts = begins_line and not LINES >> kind & 1 and stops >> LINE_START & 1
        each = self.masks.pop(segment, None) is not None and self.left[segment] + 1 >= NO_LIMIT
        return (
            each or bool(stops >> kind & 1 or starts) or (item and bool(stops >> ITEM & 1)) or self.left[segment] <= 0
        )

    def run(self) -> RequestOutput:
        self.tokens_left, start = self.budget, self.controller.start()
        assert start is not None
        self.apply(start)
        checked: Check | None = None
        while self.finish == RUNNING and self.steps < 2000:
            self.steps += 1
            check = self.decisions[-1].check
            if check is not None and check is not checked:
                self.check(checked := check)
                waits = [True]
            else:
                waits = [self.sample(segment) for segment in (sorted(self.live) or [0])]
            if any(waits) and self.finish == RUNNING:
                shown = self.controller.read(self.output())
                assert shown.finish == RUNNING
                self.apply(self.controller.follow(shown))
        return self.controller.read(self.output())


@pytest.fixture(scope="module")
def device(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Device]:
    codec = Codec(tokenizer).text
    end = int(tokenizer.eos_token_id)
    (tag,) = codec.encode("~")
    classes = token_classes(len(tokenizer), (-1,) * 5 + (tag,), (end,), (), codec)
    fields: dict[str, Any] = {"end": (end,), "max_branches": 8, "longest_head": 30, "max_queued": 30}
    fields["ends"] = frozenset((end, tag))
    config: EngineConfig = type("Config", (), fields)()  # type: ignore[assignment]

    def made(
        writes: Callable[[str, str], str],
        question: str = "How do I relax?",
        budget: int = 600,
        content: int | None = None,
        limit: int = 1024,
        closes_by_tag: bool = False,
    ) -> Device:
        params = SamplingParams(max_content_tokens=content, max_branch_tokens=limit)
        request = Request((1,) * BASE, params, "adaptive", budget, 0, messages=(question,), lists=True)
        closing, controller = tag if closes_by_tag else end, Lists(request, codec, classes, config, CHECKED)
        return Device(codec, classes, writes, controller, config, budget, end, limit, closing)

    return made


def fed(guidance: RowGuidance) -> list[int]:
    """Return the known serial tokens of decisions."""
    return [*guidance.text, *guidance.known_tokens.get(0, ())]


def texts(codec: TextCodec, output: RequestOutput) -> list[str | list[str]]:
    """Return the text of each serial segment, and those of the branches of each block."""
    return [
        codec.text_of(item) if isinstance(item, SerialIds) else [codec.text_of(text) for text in item.texts]
        for item in output.items
    ]


@pytest.mark.parametrize("file", ["mistral_tokenizer.json", "minimind_tokenizer.json"])
def test_serial_text_waits_where_a_line_begins_an_item(file: str) -> None:
    """Check the first tokens of the lines of real answers; negative control: most lines begin none, and do not wait."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(shared("data", "tokenizers", file)))
    codec = Codec(tokenizer).text
    kind = token_classes(len(tokenizer), (-1,) * 6, (), (), codec).kind
    rows = [json.loads(line) for line in shared("data", "answers", "vicuna80.jsonl").read_text().splitlines()][:200]
    items, waits, lines = 0, 0, 0
    for row in rows:
        text = row["answer"].replace("\r\n", "\n")
        ids = codec.encode(text)
        before = [codec.decode(ids[:count]) for count in range(len(ids) + 1)]
        assert before[-1] == text
        places = {0, *(found.end() for found in re.finditer("\n", text))}
        for token, (begin, end) in zip(ids, itertools.pairwise(map(len, before)), strict=True):
            starts = begin in places and not LINES >> int(kind[token]) & 1
            waits += (stops := kind[token] == LINE_OPENER or (starts and kind[token] == OPENER))
            for place in places & set(range(begin, end)):
                lines += 1
                if begins_item(text[place:].partition("\n")[0] + "\n"):
                    items += 1
                    assert stops, text[place:][:40]
    assert items > 150 and waits < 0.6 * lines


def test_an_answer_is_what_the_model_writes(device: Callable[..., Device]) -> None:
    """Check leads, bodies with nested items, joints, the text behind the list, and that the budget is what is used."""
    one = device(model("Walks", "Sleep", "Food", "Music"))
    output = one.run()
    items = [f"{n}. **{lead}**:{BODIES[lead]}\n\n" for n, lead in enumerate(("Walks", "Sleep", "Food", "Music"), 1)]
    items[-1] = items[-1].rstrip("\n")
    assert texts(one.codec, output) == ["Tips:\n\n", items, "\n\nGood luck."] and output.finish == STOP
    text = one.codec.decode(one.ids(output))
    assert text == "".join(["Tips:\n\n", *items, "\n\nGood luck."]) and one.ids(output)[-1] == one.end
    assert one.tokens_left == one.budget - len(one.ids(output))
    serial_steps = len(one.ids(output))
    assert one.steps < serial_steps and any(g.branches == 4 for g in one.decisions)
    checks = [g.check for g in one.decisions if g.check]
    tokens = sum(len(one.codec.byte_tokens.encode(item)) for item in items)
    assert -(-tokens // CHECKED) <= len(checks) <= -(-tokens // CHECKED) + 1, "passes hold what they have room for"
    assert sum(not known for check in checks for known in check.known) == len(items), "joints and the end are sampled"


def test_the_list_ends_where_the_model_ends_it(device: Callable[..., Device]) -> None:
    """Check the joints: behind the third item, the model writes other text."""
    one = device(model("Walks", "Sleep", "Food", "Music", kept=3))
    # The leads are written by a model that goes on; the check sees the whole items.
    one.writes = switched(one.writes, model("Walks", "Sleep", "Food", "Music"), one)
    output = one.run()
    shown = texts(one.codec, output)
    assert len(shown[1]) == 3 and shown[2] == "Good luck." and "Music" not in one.codec.decode(one.ids(output))
    assert output.discarded > 0


def switched(behind: Callable[[str, str], str], before: Callable[[str, str], str], one: Device) -> Any:
    return lambda serial, branch: (behind if any(g.branches for g in one.decisions) else before)(serial, branch)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_a_stream_has_the_text(
    kept: int, in_order: bool, device: Callable[..., Device], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Check the events of an answer that is read at every decision, wherever its list ends."""
    one = device(model("Walks", "Sleep", "Food", "Music", kept=kept))
    one.writes = switched(one.writes, model("Walks", "Sleep", "Food", "Music"), one)
    reader, events, apply = EventReader(Codec(tokenizer), ()), list[Event](), one.apply

    def applied(guidance: RowGuidance) -> None:
        apply(guidance)
        events.extend(reader.collect_events(one.controller.read(one.output()), None, in_order))

    one.apply = applied  # type: ignore[method-assign]
    output = one.run()
    done: Any = "done"
    events += reader.collect_events(output, done, in_order)
    whole = "".join("".join(part) for part in texts(one.codec, output))
    shown = "".join(event.text for event in events if event.kind == "token")
    ended = [event.text for event in events if event.kind == "branch"]
    assert [event.kind for event in events if event.kind in ("fork", "merge")] == ["fork", "merge"]
    assert len(ended) == kept and "".join(ended) in whole and "Good luck." in whole
    assert shown == whole or not in_order


def test_a_repeated_lead_is_tried_again_and_ends_the_outline(device: Callable[..., Device]) -> None:
    """Check that its first token is barred, which then begins another lead or none."""
    one = device(model("Walks", "Sleep", "Food", "Walks"))
    output = one.run()
    barred = [g for g in one.decisions if g.masks.get(0) and g.resume_at >= 0]
    first = one.codec.byte_tokens.encode("Walks")[0]
    assert any(not permits(g.masks[0][0], first) for g in barred)
    leads = [one.codec.decode(title) for title in output.items[1].titles]  # type: ignore[union-attr]
    assert leads[:3] == ["Walks", "Sleep", "Food"] and "Walks" not in leads[3:]


@pytest.mark.parametrize(
    ("question", "opening"),
    [
        ("Write a function that relaxes.", "Tips:\n\n"),
        ("How do I relax?", "Tips:\n\n```\n"),
        ("Solve x = 3.", "Tips:\n\n"),
    ],
)
def test_what_should_not_fork_does_not(device: Callable[..., Device], question: str, opening: str) -> None:
    """Check programs, code blocks and derivations: the same text, serially, without a hidden token."""
    one = device(model("Walks", "Sleep", "Food", opening=opening), question)
    output = one.run()
    assert not any(g.branches or g.text or g.known_tokens for g in one.decisions) and output.discarded == 0
    assert one.steps == len(one.ids(output)) and output.finish in (STOP, LENGTH)


@pytest.mark.parametrize("limit", ["budget", "content"])
@pytest.mark.parametrize("size", [220, 240, 260, 280])
def test_a_list_that_forks_keeps_its_budgets(device: Callable[..., Device], limit: str, size: int) -> None:
    """Check both budgets with bodies that exceed them: the list is cut, and its text begins as that without a limit."""
    leads = ("Reading", "Writing", "Running")
    one = device(model(*leads), **{limit: size})
    output, free = one.run(), device(model(*leads)).run()
    assert any(guidance.branches == 3 for guidance in one.decisions) and output.finish == LENGTH
    assert size - 10 < len(one.ids(output)) <= size < len(one.ids(free))
    assert one.codec.decode(one.ids(free)).startswith(one.codec.decode(one.ids(output)))


@pytest.mark.parametrize("closes_by_tag", [False, True])
def test_bodies_that_are_cut_end_with_length(device: Callable[..., Device], closes_by_tag: bool) -> None:
    """Check that the limit of a branch ends its body, whichever end the device takes, and that the answer says so."""
    whole = device(model("Walks", "Sleep", "Food")).run()
    one = device(model("Walks", "Sleep", "Food"), limit=16, closes_by_tag=closes_by_tag)
    output = one.run()
    assert output.finish == STOP and output.cut and not whole.cut
    assert max(one.sampled.values()) == 16, "no token behind the limit"
    (full,), (cut,) = ([part for part in texts(one.codec, each) if isinstance(part, list)] for each in (whole, output))
    assert len(full) == len(cut) == 3 and full[0] == cut[0] and len(cut[1]) < len(full[1])
    assert full[1].startswith(cut[1].rstrip()) and one.codec.decode(one.ids(output)).count("~") == 0


@pytest.mark.parametrize(("budget", "items"), [(240, 3), (300, 4), (1000, 6)])
def test_the_outline_has_no_lead_too_many(device: Callable[..., Device], budget: int, items: int) -> None:
    """Check that the outline ends with the items for which the budget has room: leads take steps."""
    one = device(model("Reading", "Writing", "Running", "Walks", "Sleep", "Food"), budget=budget)
    one.run()
    outline = [guidance for guidance in one.decisions if "..." in one.codec.decode(fed(guidance))]
    assert [guidance.branches for guidance in one.decisions if guidance.branches] == [items]
    assert len(outline) == items - 1 + (budget == 1000), "a further lead is tried only where the model ends the list"


@pytest.mark.parametrize("budget", range(3, 140, 17))
def test_every_budget_is_kept(device: Callable[..., Device], budget: int) -> None:
    """Check that an answer has at most its tokens, and that its text begins as that of an answer without a limit."""
    one = device(model("Walks", "Sleep", "Food", "Music"), budget=budget)
    output, free = one.run(), device(model("Walks", "Sleep", "Food", "Music")).run()
    assert len(one.ids(output)) <= budget
    whole, text = one.codec.decode(one.ids(free)), one.codec.decode(one.ids(output))
    assert text.rstrip() and whole.startswith(text)


@pytest.mark.further
class TestSmolLM2:
    """SmolLM2-135M-Instruct as it is."""

    QUESTION = "List five tips for healthy eating."

    @pytest.fixture(scope="class")
    def engine(self) -> Engine:
        try:
            lm = load_model("smollm2")
        except CheckpointError as error:
            pytest.skip(str(error))
        return Engine(lm, max_length=640, max_batch=2)

    @pytest.fixture(scope="class")
    def answer(self, engine: Engine) -> Any:
        params = SamplingParams(max_new_tokens=420, max_branch_tokens=60)
        (result,) = engine.generate([[{"role": "user", "content": self.QUESTION}]], params)
        return result

    def test_each_part_is_what_serial_decoding_writes(self, engine: Engine, answer: Any) -> None:
        """Check bodies and the text behind the list against serial greedy decoding of what they see."""
        codec, ids, greedy = engine.lm.codec.text, answer.token_ids, SamplingParams(max_new_tokens=120)
        before, block, *after = answer.structure
        assert isinstance(block, Parallel) and len(block.branches) > 1 and answer.stats.ideal_speedup > 1.1
        assert plain_text(answer.structure) == answer.text == codec.decode(answer.token_ids)
        (found,) = [one for one in lists_of(answer.text) if one.start == len(before.text)]
        prompts, bodies = [], []
        for branch, lead in zip(block.branches, found.leads, strict=True):
            assert lead is not None
            head, body = branch.text[: lead.end], branch.text[lead.end :].rstrip()
            size = next(n for n in range(len(ids)) if codec.decode(ids[:n]) == before.text)
            prompts.append([*answer.prompt_token_ids, *ids[:size], *codec.byte_tokens.encode(head)])
            bodies.append(body)
        for body, alone in zip(bodies, engine.generate(prompts, greedy, mode="serial"), strict=True):
            assert alone.text.startswith(body)
        if after:
            size = next(
                n
                for n in range(len(answer.token_ids))
                if codec.decode(answer.token_ids[:n]) + after[0].text == answer.text
            )
            prompt = [*answer.prompt_token_ids, *answer.token_ids[:size]]
            (rest,) = engine.generate([prompt], SamplingParams(max_new_tokens=420 - size), mode="serial")
            assert rest.text == after[0].text

    @pytest.mark.slow
    def test_streams_and_neighbours_change_nothing(self, engine: Engine, answer: Any) -> None:
        """Check both forms of a stream beside another request, and a stop string inside of the list."""
        message = [{"role": "user", "content": self.QUESTION}]
        params = SamplingParams(max_new_tokens=420, max_branch_tokens=60)
        other = engine.submit("The sun", SamplingParams(max_new_tokens=200), mode="serial")
        handle = engine.submit(message, params, stream="text")
        text = "".join(event.text for event in handle.events() if event.kind == "token")
        assert text == answer.text == handle.wait().text
        other.cancel()
        kinds = [event.kind for event in engine.submit(message, params, stream="branches").events()]
        assert kinds.count("fork") == kinds.count("merge") == 1 and kinds.count("branch") == len(
            answer.structure[1].branches
        )
        stop = answer.structure[1].branches[1].text[5:12]
        (stopped,) = engine.generate([message], replace(params, stop=(stop,)))
        assert stopped.text == answer.text[: answer.text.index(stop)] and stopped.finish_reason == "stop"

    def test_a_continued_answer_has_serial_lists(self, engine: Engine) -> None:
        """Check that the rules never take the beginning of an answer for the question."""
        messages = [{"role": "user", "content": self.QUESTION}, {"role": "assistant", "content": "Here are five:\n\n"}]
        continued = engine.check(messages, continue_final_message=True)
        assert engine.check(messages[:1]).lists and not continued.lists and continued.mode == "serial"

    def test_lists_may_be_serial(self, engine: Engine) -> None:
        """Check `lists="serial"` against serial mode; tags, which the model never learned, are not permitted."""
        message = [[{"role": "user", "content": self.QUESTION}]]
        params = SamplingParams(max_new_tokens=60, logit_bias={engine.config.special.title_start: 100.0})
        own = Engine(engine.lm, max_length=640, max_batch=2, lists="serial")
        assert (
            own.generate(message, params)[0].token_ids == engine.generate(message, params, mode="serial")[0].token_ids
        )
