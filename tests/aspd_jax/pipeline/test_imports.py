"""Records of other projects as structured records: `aspd data import`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aspd
from aspd_jax import LanguageModel
from aspd_jax.errors import RequestError, StructureError
from aspd_jax.pipeline import tag_formats
from aspd_jax.pipeline.imports import import_records, left_out_file
from aspd_jax.pipeline.tag_formats import FORMATS, import_answer, recognise
from aspd_jax.sources import Conversation, conversation
from aspd_jax.structure import Branch, Parallel, Serial, Structure, canonical, plain_text
from aspd_jax.tokens import Codec
from tests.conftest import shared

# Items of an answer: text, or the texts of branches; a text with `<>` stands for a block within a branch.
LINES = "ab1. :<>*-é\t世"
words = st.text(LINES, max_size=20)
parts = st.lists(words, min_size=2, max_size=4).map(
    lambda texts: [f"{number}: w{number} {text}".rstrip() for number, text in enumerate(texts, 1)]
)
items = st.lists(st.one_of(words.map(lambda text: f"t{text}"), parts), min_size=1, max_size=5)


def written(form: str, answer: list[str | list[str]]) -> str:
    """Write an answer with tags on lines of their own, independently of the project."""
    lines = []
    for item in answer:
        if isinstance(item, str):
            lines.append(item)
            continue
        titles = [f"{number}: do {number}" for number in range(1, len(item) + 1)]
        inside = [f"<Path>\n{text}\n</Path>" for text in item]
        if form == "multiverse":
            goal = [f"<Outline>\n{title}\n</Outline>" for title in titles]
            block = ["<Parallel>", "<Goal>", *goal, "</Goal>", *inside, "<Conclusion>", "so", "</Conclusion>"]
            lines += [*block, "</Parallel>"]
        elif form == "threadweaver":
            outlines = [f"<Outline>{title}</Outline>" for title in titles]
            threads = [f"<Thread>{text}</Thread>" for text in item]
            lines += ["<Parallel>", "<Outlines>", *outlines, "</Outlines>", *threads, "</Parallel>", "so"]
        elif form == "npr":
            plans = [f"<plan>{title}</plan>" for title in titles]
            steps = [f"<step>\n{text}\n</step>" for text in item]
            lines += ["<guideline>", *plans, "</guideline>", *steps, "<takeaway>", "so", "</takeaway>"]
        else:
            lines += ["<Parallel>", *inside, "</Parallel>", "<Summary>", "so", "</Summary>"]
    return "\n".join(lines)


def expected_text(answer: list[str | list[str]]) -> str:
    """Return the text of an answer in any of these formats."""
    lines = []
    for item in answer:
        lines += [item] if isinstance(item, str) else [*item, "so"]
    return "\n".join(lines)


def without_tags(text: str) -> str:
    """Remove tags and announcements with regular expressions."""
    text = re.sub(r"(?s)<(Goal|Outlines|guideline)>.*?</\1>\n?", "", text)
    text = re.sub(r"(?m)^</?(?:Parallel|Path|Thread|step|Conclusion|Summary|takeaway)>\n", "", text)
    return re.sub(r"</?(?:Parallel|Path|Thread|step|Conclusion|Summary|takeaway)>", "", text)


def blocks_of(structure: Structure) -> list[Parallel]:
    return [item for item in structure if isinstance(item, Parallel)]


def check_round_trip(form: str, answer: list[str | list[str]]) -> None:
    found = import_answer(text := written(form, answer), form)
    plain = plain_text(found.structure)
    assert plain.removesuffix("\n") == expected_text(answer) and plain == without_tags(text)
    blocks = blocks_of(found.structure)
    assert [[branch.text.strip() for branch in block.branches] for block in blocks] == [
        item for item in answer if isinstance(item, list)
    ]
    for branch in (branch for block in blocks for branch in block.branches):
        assert branch.text.startswith(branch.title) and re.match(r"\s*\d+: w", branch.title)
    assert found[1:] == (0, 0, 0, ())


@pytest.mark.parametrize("form", ["multiverse", "threadweaver", "npr", "parallel-r1"])
@given(answer=items)
def test_round_trip(form: str, answer: list[str | list[str]]) -> None:
    check_round_trip(form, answer)


FLAT = "<Parallel>\n<Path>\n1: one\n</Path>\n<Path>\n2: two\n</Path>\n</Parallel>\n<Summary>\nso\n</Summary>"
FLAT_TAGS = re.findall("<.*?>", FLAT)
pieces = st.sampled_from([*FLAT_TAGS, "\n", " ", "1: a", "2: b c", "**x**", "<"])


@given(
    st.lists(st.one_of(pieces, st.just(FLAT)), max_size=12).map("".join), st.sampled_from(["parallel-r1", "multiverse"])
)
def test_any_text_is_kept_or_refused(text: str, form: str) -> None:
    """Check that only `StructureError` is raised, and that only white space and tags are removed."""
    try:
        found = import_answer(text, form)
    except StructureError:
        return
    assert "".join(plain_text(found.structure).split()) == "".join(without_tags(text).split())


def test_round_trip_finds_a_lost_line(monkeypatch: Any) -> None:
    """Negative control: removal of tags without their lines, and removal of one character more."""
    original = tag_formats.removal_ranges
    for broken in (
        lambda text, tags: sorted(tags),
        lambda text, tags: [(start, end + (end < len(text))) for start, end in original(text, tags)],
    ):
        monkeypatch.setattr(tag_formats, "removal_ranges", broken)
        with pytest.raises(AssertionError):
            check_round_trip("npr", ["text", ["1: w1 a", "2: w2 b"], "end"])


names = st.text("ab :", min_size=1, max_size=6)
named_blocks = st.lists(st.builds(Branch, names, st.text("ab: <|\n", max_size=9)), min_size=2, max_size=4).map(Parallel)
named_items = st.lists(st.one_of(st.builds(Serial, st.text("ab<|/\n", max_size=9)), named_blocks), max_size=5)


@given(named_items)
def test_names(answer: list[Serial | Parallel]) -> None:
    text = ""
    for item in answer:
        if isinstance(item, Serial):
            text += item.text
            continue
        text += "".join(f"<|title|>{branch.title}<|/title|>" for branch in item.branches) + "<|para|>"
        text += "".join(f"<|branch|>{b.title}: {b.text}<|/branch|>" for b in item.branches) + "<|/para|>"
    assert import_answer(text, "llm-aspd").structure == canonical(answer)


NAMED = "<|title|>A<|/title|><|title|>B<|/title|><|para|><|branch|>A: x<|/branch|><|branch|>B: y<|/branch|><|/para|>"


@pytest.mark.parametrize(
    "form, text, message",
    [
        ("llm-aspd", NAMED.replace("B: y", "C: y"), r"character \d+: expected 'B: ', got 'C: y'"),
        ("llm-aspd", NAMED.replace("<|para|>", " <|para|>"), r"expected <\|para\|>, got text"),
        (
            "llm-aspd",
            NAMED.replace("x<|/branch|>", "x<|/branch|>\n"),
            r"expected <\|branch\|> or <\|/para\|>, got text",
        ),
        ("llm-aspd", NAMED.replace("<|title|>A<|/title|>", ""), "got 1 titles and 2 branches"),
        ("llm-aspd", "<|title|>A<|/title|>", r"expected <\|para\|> after the titles"),
        ("llm-aspd", NAMED.replace("x<", NAMED + "<"), r"expected no <\|title\|> in <\|branch\|>"),
        ("llm-aspd", NAMED.replace("A<|/title", "<|/title"), "title: expected text|expected ': '"),
        ("parallel-r1", FLAT.replace("two\n</Path>", "two"), r"expected </Path>, got </Parallel>"),
        ("parallel-r1", FLAT.replace("</Summary>", ""), r"character 67: expected </Summary> after this tag, got none"),
        ("parallel-r1", FLAT + "</Path>", "expected text, got </Path>"),
        ("parallel-r1", FLAT.replace("<Path>\n2", "<path>\n2"), "expected <Path>, got <path>"),
        ("parallel-r1", FLAT.replace("</Path>\n<Path>", "< / Path>\n<Path>"), "expected </Path>, got < / Path>"),
        ("parallel-r1", FLAT + "<takeaway>", "expected no tag of npr, got <takeaway>"),
        ("parallel-r1", "<Path>1: a</Path>", "expected no <Path> in serial text"),
        ("multiverse", "<Parallel><Goal><Path>a</Path></Goal></Parallel>", "expected no <Path> in <Goal>"),
        ("multiverse", "<Outline>a</Outline>", "expected no <Outline> in serial text"),
        ("multiverse", "<Parallel><Path>" * 9999, "expected fewer than 64 tags around <Parallel>, got 64"),
        ("npr", "<step>\n1: a\n</step>", "character 0: expected <guideline> before <step>"),
    ],
)
def test_what_is_not_well_formed_is_named(form: str, text: str, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        import_answer(text, form)


def test_blocks_that_do_not_fit_are_serial_text() -> None:
    """Check text between branches, branches without words, and equal beginnings: all text is kept."""
    for changed, message in (
        (FLAT.replace("</Path>\n<Path>", "</Path>\nbut\n<Path>"), "got the text 'but' between two of them"),
        (FLAT.replace("2: two", "- -"), "expected words in every branch, got none in branch 2"),
        (FLAT.replace("2: two", "1: one"), "expected branches that begin differently, got two with '1: one'"),
    ):
        found = import_answer(changed, "parallel-r1")
        assert found.structure == (Serial(without_tags(changed)),) and found.single == 0
        assert len(found.serial) == 1 and message in found.serial[0]
    single = import_answer(FLAT.replace("\n<Path>\n2: two\n</Path>", ""), "parallel-r1")
    assert single == ((Serial("1: one\nso\n"),), 0, 0, 1, ())


def test_a_number_of_branches_that_was_not_announced_is_counted() -> None:
    text = written("multiverse", [["1: w1", "2: w2", "3: w3"]])
    fewer = import_answer(text.replace("<Outline>\n3: do 3\n</Outline>\n", ""), "multiverse")
    assert fewer.unequal == 1 and fewer[:1] == import_answer(text, "multiverse")[:1]
    # ThreadWeaver's generator leaves outlines open.
    unclosed = written("threadweaver", [["1: w1", "2: w2"]]).replace("</Outline>", "")
    assert import_answer(unclosed, "threadweaver").unequal == 0


def test_nested_blocks_are_text_of_their_branch() -> None:
    inner = written("multiverse", [["1: w1 deep", "2: w2 deep"]])
    text = written("multiverse", [["1: w1 before\n" + inner + "\nafter", "2: w2 other"]])
    found = import_answer(text, "multiverse")
    (block,) = blocks_of(found.structure)
    assert found.nested == 1 and plain_text(found.structure) == without_tags(text)
    assert [branch.text for branch in block.branches] == [
        "1: w1 before\n1: w1 deep\n2: w2 deep\nso\nafter", "\n2: w2 other",
    ]  # fmt: skip
    # A block within a conclusion is in serial text.
    two = import_answer(written("multiverse", [["1: w1", "2: w2"]]).replace("so", inner), "multiverse")
    assert len(blocks_of(two.structure)) == 2 and two.nested == 0


def test_tags_within_lines_and_other_tags() -> None:
    text = "<think>\r\nSee <Parallel> <Path>1: a b</Path> <Path>2: c d</Path>\r\n</Parallel>\r\n</think>\r\n<Sum> end"
    found = import_answer(text, "parallel-r1")
    assert plain_text(found.structure) == "<think>\r\nSee  1: a b 2: c d\r\n</think>\r\n<Sum> end"
    assert [branch.text for branch in blocks_of(found.structure)[0].branches] == ["  1: a b", " 2: c d"]


@pytest.mark.parametrize("form", FORMATS)
def test_recognition(form: str) -> None:
    text = NAMED if form == "llm-aspd" else written(form, [["1: w1", "2: w2"]])
    assert recognise(["plain", "<think>", text]) == form
    other = written("npr" if form == "multiverse" else "multiverse", [["1: w1", "2: w2"]])
    assert recognise([text, other, text]) == form  # the majority; the other is refused later
    with pytest.raises(RequestError, match=r"those of .* and .*\. Give --from NAME, one of llm-aspd, multiverse"):
        recognise([text, other])
    with pytest.raises(RequestError, match=r"got none\. Give --from NAME, one of llm-aspd, multiverse"):
        recognise(["plain", f"{text} {other}"])
    bare = "<Parallel><Path>a</Path></Parallel>"
    with pytest.raises(RequestError, match="those of multiverse and parallel-r1"):
        recognise([bare])
    assert recognise([bare, FLAT]) == "parallel-r1"


ANSWER = written("multiverse", ["text", ["1: w1 a", "2: w2 b"], "end"])
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ANSWER}]
RENDERED = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in MESSAGES)
ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "rendered": {"text": RENDERED, "question": "other", "solution": "3"},
    "ThreadWeaver": {"qwen_text": RENDERED + "<|endoftext|>", "question": "other", "response_content": "3"},
    "Multiverse-1K": {"question": "q", "solution": "3", "deepseek_thinking_trajectory_parallel": ANSWER},
    "Parallel-R1": {"prompt": MESSAGES[:1], "output": ANSWER, "index": 1},
    "Alpaca": {"instruction": "q", "input": "", "output": ANSWER, "history": [], "system": ""},
}


@pytest.mark.parametrize("name", ROWS)
def test_columns(name: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[name]) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[name]]), tmp_path / "in.parquet")
    for source in ("in.jsonl", "in.parquet"):
        report = import_records(str(tmp_path / source), tmp_path / "out.jsonl")
        assert (report.format, report.written, report.blocks, report.branches) == ("multiverse", 1, 1, 2)
        found = conversation(json.loads((tmp_path / "out.jsonl").read_text()), 1)
        assert isinstance(found, Conversation)
        assert found.messages == (("user", "q"), ("assistant", "text\n1: w1 a\n2: w2 b\nso\nend"))
        assert found.structure(1) == import_answer(ANSWER, "multiverse").structure


def test_the_parts_of_an_answer_in_columns_are_joined(tmp_path: Path) -> None:
    row = ROWS["Multiverse-1K"] | {"deepseek_attempt": "The answer."}
    (tmp_path / "in.json").write_text(json.dumps([row]))
    import_records(str(tmp_path / "in.json"), tmp_path / "out.jsonl")
    found = conversation(json.loads((tmp_path / "out.jsonl").read_text()), 1)
    assert isinstance(found, Conversation) and found.messages[1][1].endswith("so\nend\n\nThe answer.")


def test_bad_records_are_named_and_end_nothing(tmp_path: Path, capsys: Any) -> None:
    bad = [
        {"question": "q", "answer": ANSWER.replace("</Goal>", "")},
        {"question": "q", "answer": written("npr", [["1: w1", "2: w2"]])},
        {"text": "<|im_start|>user\nq"},
        {"prompt": [{"role": "alien", "content": "q"}], "output": ANSWER},
        {"question": "q"},
        {"messages": MESSAGES[:1], "structure": [{"type": "serial", "text": "a"}]},
    ]
    mixed = {"question": "q", "answer": ANSWER.replace("</Path>\n<Path>", "</Path>\nand\n<Path>")}
    rows = [ROWS["chat"], *bad, mixed, {"messages": [*MESSAGES, MESSAGES[0]]}]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("{\n" + "".join(json.dumps(row) + "\n" for row in rows))
    assert aspd.main(["data", "import", str(file), "--output", str(output)]) == 0
    said = capsys.readouterr()
    for line, reason in (
        (1, "not JSON"),
        (3, r"messages\[1\], character \d+: expected no <Path> in <Goal>"),
        (4, r"messages\[1\], character 0: expected no tag of npr, got <guideline>"),
        (5, r"text, character 0: expected <\|im_start\|>ROLE"),
        (6, r'prompt\[0\]\.role: expected one of .*, got "alien"'),
        (7, "no question and answer"),
        (8, "expected an answer with tags, got a structured answer"),
        (9, r"messages\[1\], character \d+: a block is serial text: expected only branches"),
        (10, r"messages\[2\]: no answer follows"),
    ):
        assert re.search(rf"left out: {re.escape(str(file))}, line {line}: {reason}", said.err), line
    assert "10 records" in said.out and "3 written: 2 blocks with 4 branches" in said.out
    assert "7 records left out" in said.out and "1 other blocks are serial text" in said.out
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [2, 9, 10]
    rest = [json.loads(line) for line in left_out_file(output).read_text().splitlines()]
    assert [record["line"] for record in rest] == [1, *range(3, 11)] and str(left_out_file(output)) in said.out
    assert [record["stage"] for record in rest] == ["read", "record", "record", *["read"] * 4, "block", "turn"]


def test_mistakes_are_named_and_write_nothing(tmp_path: Path, capsys: Any) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    output.write_text("old")
    row = json.dumps(ROWS["chat"]) + "\n"
    for content, arguments, message in (
        (row, ["--from", "apar"], "--from: expected one of llm-aspd, multiverse, threadweaver, npr, parallel-r1, got"),
        (
            row,
            ["--from", "npr"],
            "no record can be used; the first: .*line 1: .*expected no tag of multiverse and .*, got <Parallel>",
        ),
        ('{"question": "q", "answer": "a"}\n', [], "in.jsonl: expected tags of one format in the answers"),
        ("", [], "in.jsonl: expected tags of one format in the answers"),
        ("x\n", [], "no record can be used; the first: .*line 1: not JSON"),
    ):
        file.write_text(content)
        assert aspd.main(["data", "import", str(file), "--output", str(output), *arguments]) == 2
        said = capsys.readouterr()
        assert re.search(message, said.err) and not said.out and "Traceback" not in said.err
    assert aspd.main(["data", "import", "none.jsonl", "--output", str(output)]) == 2
    assert output.read_text() == "old" and sorted(path.name for path in tmp_path.iterdir()) == [file.name, output.name]


def test_training_reads_what_is_written(tmp_path: Path, lm: LanguageModel) -> None:
    """Check that leads and names linearise in their form, and that names are refused as leads."""
    rows = {"leads": ROWS["chat"], "names": {"question": "q", "answer": f"a{NAMED}b"}}
    for titles, row in rows.items():
        (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
        report = import_records(str(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
        assert f"model.titles={titles}" in report.text()
        found = conversation(json.loads((tmp_path / "out.jsonl").read_text()), 1)
        assert isinstance(found, Conversation)
        codec = Codec(lm.tokenizer, lm.special_tokens, titles)  # type: ignore[arg-type]
        assert codec.parse(codec.linearise(found.structure(1)).tokens) == found.structure(1)
    with pytest.raises(StructureError, match="because titles are leads"):
        Codec(lm.tokenizer, lm.special_tokens, "leads").linearise(found.structure(1))


def test_real_records_of_parallel_r1(tmp_path: Path) -> None:
    file = shared("formats", "parallel_r1_sft_gsm8k_v2.jsonl")
    report = import_records(str(file), tmp_path / "out.jsonl")
    assert (report.format, report.written, report.blocks, report.branches) == ("parallel-r1", 3, 3, 6)
    assert not report.left_out and "alternatives of a question are read as branches" in report.text()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, line in zip(rows, (tmp_path / "out.jsonl").read_text().splitlines(), strict=True):
        found = conversation(json.loads(line), 1)
        assert isinstance(found, Conversation) and found.id == str(row["index"])
        assert found.messages == (("user", row["prompt"][0]["content"]), ("assistant", without_tags(row["output"])))
        inside = re.findall(r"(?s)<Path>(.*?)</Path>", row["output"])
        (block,) = blocks_of(found.structure(1))
        assert [branch.text.strip() for branch in block.branches] == [text.strip() for text in inside]
