"""Records to packed batches: text is unchanged, and every left-out record is listed."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import train.records
from aspd_jax import LanguageModel
from aspd_jax.errors import ConfigError, DataError
from aspd_jax.sources import Conversation, conversation
from aspd_jax.structure import from_json, plain_text, to_json
from aspd_jax.tokens import add_special_tokens
from tests.conftest import ROOT, shared
from tests.helpers.tasks import problem
from train.batches import record_batches, record_held_out, record_steps
from train.config import DataSection, ModelSection, TrainConfig
from train.records import Example, Records, encode_conversation

STRUCTURE = [
    {"type": "serial", "text": "Two:\n"},
    {"type": "parallel", "branches": [{"title": "A", "text": "one.\n"}, {"title": "B", "text": "two.\n"}]},
    {"type": "serial", "text": "Done."},
]
MODEL = ModelSection(checkpoint="none")  # is not read
DATA = DataSection(plain_every=0, length=256, bins=4, rows=2)


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in records))
    return str(path)


def synthetic(count: int) -> list[dict[str, Any]]:
    made = [problem(seed, False, "machines") for seed in range(count)]
    return [{"messages": [{"role": "user", "content": p.question}], "structure": to_json(p.structure)} for p in made]


CONVERSATION = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes, one."},
        {"role": "user", "content": "Two?"},
    ],
    "structure": STRUCTURE,
}


def record_of(row: Any) -> Conversation:
    found = conversation(row, 1)
    assert isinstance(found, Conversation)
    return found


def encoded(lm: LanguageModel, row: Any = None, structured: bool = True) -> Example:
    """The only example of a record, of which nothing is left out."""
    (item,), skipped = encode_conversation(lm, record_of(row or CONVERSATION), structured)
    assert not skipped
    return item


def test_every_turn_is_kept_and_loss_lies_on_answers(lm: LanguageModel) -> None:
    item = encoded(lm)
    end = lm.end_ids[0]
    text = lm.codec.text
    prompt = lm.tokenizer.apply_chat_template(
        CONVERSATION["messages"][:2], add_generation_prompt=True, return_dict=False
    )
    first, second = (
        text.encode("Yes, one."),
        lm.codec.linearise(from_json(STRUCTURE)),
    )
    between = lm.tokenizer.encode("<|user|>Two?<|assistant|>", add_special_tokens=False)
    assert item.tokens.tolist() == [*prompt, *first, end, *between, *second.tokens, end]
    learned = [*[False] * len(prompt), *[True] * (len(first) + 1), *[False] * len(between), *~second.fed, True]
    assert item.loss.tolist() == learned


def test_plain_answers_read_as_the_template_renders_them(lm: LanguageModel) -> None:
    item = encoded(lm, structured=False)
    answer = plain_text(from_json(STRUCTURE))
    whole = [*CONVERSATION["messages"], {"role": "assistant", "content": answer}]
    assert lm.tokenizer.decode(item.tokens) == lm.tokenizer.apply_chat_template(whole, tokenize=False)


BLOCKS = [
    *STRUCTURE[:2],
    {"type": "serial", "text": "And three:\n"},
    {
        "type": "parallel",
        "branches": [{"title": t, "text": f"{t} is here.\n"} for t in ("C", "D", "E")],
    },
    {"type": "serial", "text": "Done."},
]


def test_a_real_chat_template(lm: LanguageModel, tmp_path: Path) -> None:
    source = shared("data", "tokenizers")
    for kind in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / kind).write_text((source / f"minimind_{kind}").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    special = add_special_tokens(tokenizer)
    real = replace(lm, tokenizer=tokenizer, special_tokens=special, end_ids=(tokenizer.eos_token_id,))
    real.__dict__.pop("codec", None)
    item = encoded(real)
    prompt = tokenizer.apply_chat_template(CONVERSATION["messages"][:2], add_generation_prompt=True, return_dict=False)
    assert item.tokens[: len(prompt)].tolist() == list(prompt) and not item.loss[: len(prompt)].any()
    assert (item.tokens[item.loss] == tokenizer.eos_token_id).sum() == 2
    start = len(prompt) + len(real.codec.text.encode("Yes, one.")) + 1
    branch = np.flatnonzero(item.tokens == special.branch_start)
    assert len(branch) == 2 and (branch > start).all()


def test_what_cannot_be_used_is_named_with_its_line(lm: LanguageModel, tmp_path: Path) -> None:
    good = synthetic(4)
    lines = [
        good[0],
        "{not json",
        "",
        {"messages": [{"role": "user", "content": "?"}]},
        {"messages": [{"role": "user", "content": "?"}], "answer": ""},
        {"messages": [{"role": "user", "content": "long " * 400}], "answer": "x"},
        {"messages": [{"role": "user"}], "answer": "x"},
        {"messages": [{"role": "user", "content": "?"}], "structure": [{"type": "list"}]},
        good[1],
        {"question": "?"},
    ]
    file = write(tmp_path / "data.jsonl", lines)
    records = Records(lm, [file], DATA, tmp_path / "cache")
    assert len(records) == 2
    found = {(p.line, p.kind) for p in records.problems}
    assert found == {
        (2, "malformed"), (4, "malformed"), (5, "malformed"), (6, "over-long"), (7, "malformed"), (8, "malformed"),
        (10, "malformed"),
    }  # fmt: skip
    reasons = {p.line: p.reason for p in records.problems}
    assert (
        "not JSON" in reasons[2]
        and reasons[4] == reasons[5] == "expected an answer, got none"
        and "data.length is 256" in reasons[6]
    )
    assert "messages[0].content: expected a string" in reasons[7] and "item 0" in reasons[8]
    assert "9 records, 2 used" in records.report() and "data.jsonl, line 2" in records.report()
    with pytest.raises(DataError, match=r"data.jsonl, line 2: not JSON"):
        Records(lm, [file], replace(DATA, strict=True), tmp_path / "cache")


def test_nothing_usable_and_missing_files_are_errors(lm: LanguageModel, tmp_path: Path) -> None:
    for name, reason in (("none.jsonl", "No such file"), (".", "Is a directory"), ("x" * 300, "File name too long")):
        with pytest.raises(DataError, match=rf"{name}: expected a file of records, got: {reason}"):
            Records(lm, [str(tmp_path / name)], DATA, tmp_path / "cache")
    file = write(tmp_path / "bad.jsonl", ["[]"])
    with pytest.raises(DataError, match=r"no record can be used; the first: .*bad\.jsonl, line 1: expected an object"):
        Records(lm, [file], DATA, tmp_path / "cache")
    bare = replace(lm, end_ids=())
    with pytest.raises(ConfigError, match="eos_token_id: expected the end-of-text token"):
        Records(bare, [file], DATA, tmp_path / "cache")


def test_tokenised_once(lm: LanguageModel, tmp_path: Path, monkeypatch: Any) -> None:
    file = write(tmp_path / "data.jsonl", synthetic(6))
    before = Records(lm, [file], DATA, tmp_path / "cache")
    monkeypatch.setattr(train.records, "read_records", lambda file: pytest.fail("tokenised again"))
    after = Records(lm, [file], DATA, tmp_path / "cache")
    assert len(after) == len(before) > 2
    for index in range(len(before)):
        np.testing.assert_array_equal(before[index].tokens, after[index].tokens)
    with pytest.raises(pytest.fail.Exception):
        Records(lm, [file], replace(DATA, structured=False), tmp_path / "cache")


def test_runs_with_another_name_of_a_special_token_share_no_tokens(lm: LanguageModel, tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", synthetic(2))
    for name in ("<one>", "<two>", "<one>"):
        tokenizer = deepcopy(lm.tokenizer)
        tokenizer.chat_template, tokenizer.bos_token = "{{ bos_token }}" + lm.tokenizer.chat_template, name
        first = Records(replace(lm, tokenizer=tokenizer), [file], DATA, tmp_path / "cache")[0].tokens
        assert lm.tokenizer.decode(first).startswith(name)


TOKENISE = """
import sys
from dataclasses import replace
from pathlib import Path
import train.records
from aspd_jax import load_model
read = train.records.read_records
def slowly(file):
    print("tokenising", flush=True)
    sys.stdin.readline()
    return read(file)
train.records.read_records = slowly
lm, data = load_model("demo"), train.records.DataSection()
print("begun", flush=True)
print(len(train.records.Records(lm, [sys.argv[1]], data, Path(sys.argv[2]))))
"""


@pytest.mark.further
def test_of_two_runs_one_tokenises(tmp_path: Path) -> None:
    """Check that a run waits for another one that fills the same cache, and reads what that one has written."""
    command = [sys.executable, "-c", TOKENISE, write(tmp_path / "data.jsonl", synthetic(8)), str(tmp_path / "cache")]
    first, second = (
        subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    )
    for process in (first, second):
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
    for process in (first, second):
        print(file=process.stdin, flush=True)
    outputs = sorted(process.stdout.read() for process in (first, second) if process.stdout is not None)
    assert outputs == ["8\n", "tokenising\n8\n"]
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix != ".arrow"]


def test_runs_with_another_form_of_titles_share_no_tokens(lm: LanguageModel, tmp_path: Path) -> None:
    branches = [{"title": lead, "text": f"{lead} text.\n"} for lead in ("1. One:", "2. Two:")]
    record = {"messages": [{"role": "user", "content": "?"}], "structure": [{"type": "parallel", "branches": branches}]}
    file = write(tmp_path / "data.jsonl", [record])
    leads = replace(lm, config=replace(lm.config, titles="leads"))
    unused = replace(leads, config=replace(leads.config, unused_tokens=((0, 4096),)))
    alone = {name: Records(model, [file], DATA, tmp_path / name) for name, model in {"a": lm, "b": leads}.items()}
    assert alone["a"][0].tokens.tolist() != alone["b"][0].tokens.tolist()
    for name, model in {"b": leads, "a": lm}.items():
        shared_cache = Records(model, [file], DATA, tmp_path / "shared")
        np.testing.assert_array_equal(shared_cache[0].tokens, alone[name][0].tokens)
    with pytest.raises(DataError, match="expected rows of the embedding"):
        Records(unused, [file], DATA, tmp_path / "shared")


def test_batches_hold_every_record_once_an_epoch(lm: LanguageModel, tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", synthetic(40))
    config = TrainConfig(MODEL, data=replace(DATA, train=(file,)), steps=0, epochs=2)
    records = Records(lm, [file], config.data, tmp_path / "cache")
    wanted = sorted([records[n].tokens.tolist() for n in range(len(records))] * 2)
    stream = record_batches(records, lm.codec.special, config, 2)
    batches = [next(stream) for _ in range(record_steps(records, config))]
    with pytest.raises(StopIteration):
        next(stream)
    found = []
    for batch in batches:
        for row in range(2):
            for number in range(1, batch.layout.sequence[row].max() + 1):
                found.append(batch.tokens[row][batch.layout.sequence[row] == number].tolist())
    assert len(batches) > 4
    # The last rows may not fill a batch; nothing else is missing, and nothing is there more than twice.
    missing = list(wanted)
    for tokens in found:
        missing.remove(tokens)
    assert sum(map(len, missing)) <= 2 * 256
    parts = np.concatenate([batch.part.ravel() for batch in batches])
    assert set(parts) == {0, 1, 2}


def test_records_that_fill_no_batch_are_refused(lm: LanguageModel, tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", synthetic(2))
    config = TrainConfig(MODEL, data=replace(DATA, train=(file,)), epochs=1)
    records = Records(lm, [file], config.data, tmp_path / "cache")
    one_row = replace(config, data=replace(config.data, rows=1))
    assert record_steps(records, one_row) > 0
    with pytest.raises(DataError, match="expected records for at least one batch of 8 x 256 tokens in 1 epochs"):
        record_steps(records, replace(config, data=replace(config.data, rows=8)))


def test_the_stream_goes_on_where_it_stood(lm: LanguageModel, tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", synthetic(30))
    config = TrainConfig(MODEL, data=replace(DATA, train=(file,)), steps=1)
    records = Records(lm, [file], config.data, tmp_path / "cache")

    def stream() -> Any:
        return record_batches(records, lm.codec.special, config)

    whole = stream()
    for _ in range(5):
        next(whole)
    state = json.loads(json.dumps(whole.get_state()))
    resumed = stream()
    resumed.set_state(state)
    for _ in range(12):
        a, b = next(whole), next(resumed)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.layout.position, b.layout.position)
    other = record_batches(records, lm.codec.special, replace(config, seed=1))
    assert not np.array_equal(next(other).tokens, next(stream()).tokens)


def test_held_out_batches_fill_up_with_padding(lm: LanguageModel, tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", synthetic(3))
    data = replace(DATA, train=("other.jsonl",), held_out=(file,), rows=8)
    config = TrainConfig(MODEL, data=data, steps=1, evaluate_batches=3)
    records = Records(lm, [file], config.data, tmp_path / "cache")
    batches = record_held_out(records, lm.codec.special, config)
    assert len(batches) == 1 and batches[0].tokens.shape == (8, 256)
    assert not batches[0].loss[-1].any() and batches[0].loss.any()
