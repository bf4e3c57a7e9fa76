"""The demonstration page in a browser, with scripted answers instead of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import infer.server
from infer.server.app import POLICY
from tests.helpers.browser import chromium

pytestmark = pytest.mark.further

HTML = (Path(infer.server.__file__).parent / "page.html").read_text().replace("{{model}}", "scripted")
URL = "http://page.test/"
# Replaces the network: answers requests with `script`, one entry each, and keeps the bodies in `sent`.
FETCH = """
window.sent = []; window.script = [];
window.fetch = async (url, options) => {
  if (url === "v1/models") return Response.json({data: [{id: "scripted"}]});
  sent.push(JSON.parse(options.body));
  const {unreachable, status, body, headers, stream, ends} = script.shift();
  if (unreachable) throw new TypeError("Failed to fetch");
  if (status) return new Response(body, {status, headers});
  return new Response(new ReadableStream({start(control) {
    window.push = (text) => control.enqueue(new TextEncoder().encode(text));
    window.finish = () => control.close();
    window.tear = () => control.error(new TypeError("network error"));
    options.signal.addEventListener("abort", () => control.error(new DOMException("stopped", "AbortError")));
    push(stream ?? "");
    if (ends) finish();
  }}));
};
"""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "town": {}, "pieces": {}}}
FIELDS = {"name": "Mära *Lindqvist*", "town": "Trondby", "pieces": 12}
ANSWERED = "#spoken:has-text('answered')"
FAILED = "#spoken:has-text('no answer')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open the page on a desktop, as the server sends it; it may not fail or request anything else."""
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("request", lambda request: problems.append(request.url) if request.url != URL else None)
    headers = {"Content-Security-Policy": POLICY}
    opened.route("**/*", lambda route: route.fulfill(body=HTML, content_type="text/html", headers=headers))
    opened.add_init_script(FETCH)
    opened.goto(URL)
    opened.set_default_timeout(20_000)
    yield opened
    opened.close()
    assert not problems


def sse(*events: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)


def delta(event: str, text: str = "", block: int = 0, branch: int = 0, tokens: int = 0, **more: Any) -> dict[str, Any]:
    place = {"event": event, "block": block, "branch": branch, **more}
    choice = {"index": 0, "delta": {"content": text, "aspd": place}, "finish_reason": None}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def closing(tokens: int, reason: str = "stop", structure: Any = (), compiled: int = 0) -> str:
    """Return the last event, with the statistics that the server sends, and the end of the stream."""
    seconds = {"prefill": 0.0, "total": 1.0}
    figures = {"content_tokens": tokens, "steps": 7, "programs_compiled": compiled, "seconds": seconds}
    cost = {"statistics": figures, "structure": list(structure), "token_ids": [1, 2, 3]}
    choices = [{"index": 0, "delta": {}, "finish_reason": reason}]
    return sse({"choices": choices, "usage": {"completion_tokens": tokens}, "aspd": cost}) + "data: [DONE]\n\n"


def serial(text: str, **last: Any) -> dict[str, Any]:
    """Return a script: the text word by word, in a stream that ends."""
    words = re.findall(r"\s*\S+|\s+$", text)
    deltas = [delta("token", word, tokens=number) for number, word in enumerate(words, 1)]
    return {"stream": sse(*deltas) + closing(len(words), **last), "ends": True}


def block(titles: list[str], texts: list[str], number: int = 1) -> str:
    """Return the events of a block: a piece of each branch in turn, as branches are decoded."""
    pieces = [re.findall(r".{1,4}", text, re.DOTALL) for text in texts]
    events = [delta("fork", block=number, titles=titles)]
    for turn in zip_longest(*pieces):
        for branch, piece in enumerate(turn, 1):
            if piece is not None:
                events.append(delta("token", piece, number, branch))
    events += [delta("branch", text, number, branch) for branch, text in enumerate(texts, 1)]
    return sse(*events, delta("merge", block=number))


def leads() -> list[str]:
    """Return the texts of the branches of `FIELDS`: literal leads and values."""
    pairs = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in FIELDS.items()]
    return [("{" if number == 0 else ", ") + pair for number, pair in enumerate(pairs)]


def play(page: Any, *scripts: dict[str, Any]) -> None:
    page.evaluate("scripts => script.push(...scripts)", list(scripts))


def put(page: Any, question: str = "What?", end: str = ANSWERED) -> None:
    """Ask, and wait for what says that the runs have ended; empty: do not wait."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    if end:
        page.wait_for_selector(end, state="attached")


def figures(page: Any) -> list[tuple[float, int]]:
    """Return the seconds and the tokens of the runs of the last turn."""
    shown = page.locator(".turn:last-child .figures").all_inner_texts()
    pairs = [re.fullmatch(r"(\d+\.\d+) s · (\d+) tokens?", text) for text in shown]
    return [(float(pair[1]), int(pair[2])) for pair in pairs if pair]


def use_schema(page: Any, text: str) -> None:
    page.check("#structured")
    page.fill("#schema", text)


def test_fields_in_parallel(page: Any) -> None:
    """Check that the branches and the text after them are the JSON, on the page and in the conversation."""
    whole = json.dumps(FIELDS, ensure_ascii=False)
    use_schema(page, json.dumps(SCHEMA))
    end = sse(delta("token", "}", tokens=20)) + closing(20)
    play(page, {"stream": block(list(FIELDS), leads()) + end, "ends": True}, serial(whole))
    put(page, "Who?")
    assert page.locator(".turn .branch .title").all_inner_texts() == list(FIELDS)
    answers = [page.locator(f".run:nth-child({side}) .answer .text").all_text_contents() for side in (1, 2)]
    assert [len(parts) for parts in answers] == [4, 1] and ["".join(parts) for parts in answers] == [whole] * 2
    assert page.locator(".branch.ended").count() == 3 and page.locator(".lanes svg").count() == 2
    own, other = page.evaluate("sent")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert own["response_format"] == other["response_format"] == form
    expected = {"stream": "branches", "statistics": True}
    assert own["aspd"] == expected | {"mode": "adaptive", "fields": "parallel"}
    assert other["aspd"] == expected | {"mode": "serial", "fields": "serial"}
    assert page.evaluate("said[1].content") == whole
    assert "texts differ" not in page.inner_text(".ratio")

    page.click("#anew")
    swapped = [leads()[1], leads()[0], leads()[2]]
    play(page, {"stream": block(list(FIELDS), swapped) + end, "ends": True}, serial(whole))
    put(page, "Who?")
    assert page.evaluate("said[1].content") != whole and "the two texts differ" in page.inner_text(".ratio")
    page.uncheck("#parallel")
    play(page, serial(whole))
    put(page, "Alone?", "text=there is nothing to compare")
    page.wait_for_selector(ANSWERED, state="attached")
    assert page.evaluate("sent.at(-1).aspd.fields") == "serial" and page.evaluate("sent.length") == 5


def test_leads_are_shown_with_their_text_only(page: Any) -> None:
    """Check that a lead is not shown twice, and the branches are one list."""
    titles, texts = ["\n\n1. **A**:", "\n\n2. **B**:"], ["\n\n1. **A**: a", "\n\n2. **B**: b"]
    whole = "So:" + "".join(texts) + "\n\nEnd"
    stream = sse(delta("token", "So:")) + block(titles, texts) + sse(delta("token", "\n\nEnd")) + closing(9)
    play(page, {"stream": stream, "ends": True}, serial(whole))
    put(page)
    assert page.locator(".run:first-child .branch .title:visible").count() == 0
    shown = page.locator(".run:first-child .branch .text").all_inner_texts()
    assert ["A" in shown[0], "B" in shown[1], len(shown)] == [True, True, 2] and "**" not in "".join(shown)
    assert page.evaluate("said[1].content") == whole and page.evaluate("sent[1].aspd.content") == whole


def test_text_around_blocks(page: Any) -> None:
    """Check two blocks in reading order, the text sent to serial mode, and the tokens in the next turn."""
    text = ["Intro: ", "* a\n* b\n", "then ", "1. c\n2. d", " end"]
    middle = sse(delta("token", text[2]))
    play(page, {
        "stream": sse(delta("token", text[0])) + block(["A", "B"], ["* a\n", "* b\n"]) + middle
        + block(["C", "D"], ["1. c\n", "2. d"], 2) + sse(delta("token", text[4])) + closing(9), "ends": True,
    }, serial("".join(text)), serial("yes"), serial("yes"))  # fmt: skip
    put(page)
    assert page.evaluate("sent[1].aspd.content") == "".join(text) and page.evaluate("sent[1].aspd.mode") == "serial"
    assert [item.strip() for item in page.locator(".run:first-child .answer > *").all_inner_texts()][::2] == [
        "Intro:", "then", "end"
    ]  # fmt: skip
    assert page.locator(".run:first-child .lanes rect").count() == 3 + 4
    put(page, "And?", "article:nth-child(2) .ratio:has-text('x')")
    assert page.evaluate("sent[2].messages.map(message => message.content)") == ["What?", "".join(text), "And?"]
    assert page.evaluate("sent[2].messages[1].aspd.token_ids") == [1, 2, 3]
    assert "no independent parts" in page.inner_text(".turn:last-child .ratio")


def test_text_that_a_limit_removed(page: Any) -> None:
    """Check that the final text leaves out streamed text beyond the limit."""
    page.uncheck("#compare")
    kept = [{"branches": [{"title": "A", "text": "one two"}, {"title": "B", "text": "thr"}]}]
    play(page, {"stream": block(["A", "B"], ["one two", "three four"]) + closing(3, "length", kept), "ends": True})
    put(page)
    assert page.evaluate("said[1].content") == "one twothr"
    assert page.locator(".branch .text").all_inner_texts() == ["one two", "thr"]
    assert "limit of 512 tokens" in page.inner_text(".note")


def test_clock_tokens_and_ratio(page: Any) -> None:
    play(page, {}, serial("one two three", compiled=2))
    put(page, end="")
    page.evaluate("text => push(text)", sse(delta("token", "one", tokens=1)))
    page.wait_for_selector(".figures:text-matches('^0.[3-9] s · 1 token$')")
    assert page.inner_text(".ratio") == "" and page.locator(".figures").nth(1).inner_text() == "waiting"
    assert page.get_attribute(".answer >> nth=0", "aria-busy") == "true"
    page.wait_for_timeout(300)
    page.evaluate("text => push(text)", sse(delta("token", " two three", tokens=3)))
    page.wait_for_timeout(700)  # the clock counts to the last token, not to the end of the stream
    page.evaluate("text => { push(text); finish(); }", closing(3))
    page.wait_for_selector(ANSWERED, state="attached")
    (own, tokens), (other, others) = figures(page)
    assert tokens == others == 3 and 0.5 < own < 1.3 and other < 0.3
    ratio = page.inner_text(".ratio")
    found = re.match(r"(\d+\.\d\d)x: 7 steps, serial 7; ", ratio)
    assert found and abs(float(found[1]) - other / own) < 0.02
    assert ratio.endswith("2 programs were compiled meanwhile: ask again")
    page.uncheck("#compare")
    play(page, serial("alone"))
    put(page, "And?", ".turn:nth-child(2) .figures:has-text('1 token')")
    assert page.locator(".turn:nth-child(2) .run .answer").count() == 1
    assert page.inner_text(".turn:nth-child(2) .ratio") == ""


BROKEN = sse(delta("token", "begun", tokens=1))
REFUSED = {"error": {"message": "aspd.fields: expected one of 'serial'", "param": "aspd.fields"}}
LONG = {"error": {"message": "the prompt leaves no room", "code": "context_length_exceeded"}}
KEY = {"error": {"message": "expected a valid API key"}}
ERRORS = {
    "key": ({"status": 401, "body": json.dumps(KEY)}, "API key", "key under settings"),
    "length": ({"status": 400, "body": json.dumps(LONG)}, "leaves no room", "Shorten the question"),
    "refused": ({"status": 400, "body": json.dumps(REFUSED)}, "aspd.fields: expected", "ask again"),
    "busy": ({"status": 429, "body": "{}", "headers": {"Retry-After": "9"}}, "429", "in 9 seconds"),
    "gateway": ({"status": 502, "body": "<h1>Bad Gateway</h1>"}, "502", "server's log"),
    "unreachable": ({"unreachable": True}, "cannot be reached", "Check that it runs"),
    "cut": ({"stream": BROKEN, "ends": True}, "broke off", "Check that the server runs"),
    "event": ({"stream": BROKEN + sse({"error": {"message": "the server failed"}})}, "the server failed", "Ask again"),
    "garbage": ({"stream": BROKEN + "data: {nonsense\n\n"}, "not JSON", "reload the page"),
    "block": ({"stream": sse(delta("token", "x", 3, 1))}, "", "Reload the page"),
}  # fmt: skip


@pytest.mark.parametrize("script, message, remedy", ERRORS.values(), ids=ERRORS)
def test_errors(page: Any, script: dict[str, Any], message: str, remedy: str) -> None:
    """Check that errors replace the answer, name a remedy, are announced, and end with the next question."""
    play(page, script)
    put(page, "Why?", FAILED)
    alert = page.locator(".run:first-child .answer .error[role=alert]")
    assert message in alert.inner_text() and remedy in alert.inner_text() and alert.is_visible()
    assert page.input_value("#question") == "Why?" and page.evaluate("said.length") == 0
    assert page.locator(".figures").nth(1).inner_text() == "not asked"
    assert page.evaluate("document.querySelector('#settings').open") == ("settings" in remedy)
    play(page, serial("so"), serial("so"))
    put(page, "Why?")
    assert page.locator(".error").count() == 0 and page.locator(".turn").count() == 1


def test_an_error_of_the_second_run(page: Any) -> None:
    """Check that the first answer stays, without a ratio."""
    play(page, serial("kept"), {"status": 500, "body": "{}"})
    put(page)
    assert page.locator(".run:nth-child(2) .error[role=alert]").is_visible()
    assert page.evaluate("said[1].content") == "kept" and page.inner_text(".ratio") == ""
    play(page, {})
    put(page, "Torn?", "")
    page.evaluate("text => { push(text); tear(); }", BROKEN)
    page.wait_for_selector(FAILED, state="attached")
    assert "The connection broke" in page.inner_text(".turn:nth-child(2) .error")


@pytest.mark.parametrize("schema", ["", "{'name': 1}", "[]", "null"])
def test_a_schema_that_cannot_be_read(page: Any, schema: str) -> None:
    use_schema(page, schema)
    put(page, "Who?", FAILED)
    assert "schema is not" in page.inner_text(".error") and "Correct the schema box" in page.inner_text(".error")
    assert page.get_attribute("#schema", "aria-invalid") == "true" and page.evaluate("sent.length") == 0
    use_schema(page, "{}")
    play(page, serial("{}"), serial("{}"))
    page.press("#schema", "Control+Enter")
    page.wait_for_selector(ANSWERED, state="attached")
    assert page.get_attribute("#schema", "aria-invalid") is None and page.evaluate("sent.length") == 2


def test_enter_always_says_something(page: Any) -> None:
    page.press("#question", "Enter")
    assert page.inner_text("#hint") == "Type a question first, or choose an example."
    page.type("#question", "W")
    assert page.inner_text("#hint") == ""
    page.press("#question", "Shift+Enter")
    assert page.input_value("#question") == "W\n" and page.evaluate("sent.length") == 0
    play(page, {})
    put(page, end="")
    for press in (
        lambda: put(page, "Next?", ""),
        lambda: page.click("#ask", force=True),
        lambda: page.press("#compare", "Enter"),
    ):
        page.type("#question", "!")
        assert page.inner_text("#hint") == ""
        press()
        assert "being decoded" in page.inner_text("#hint") and page.is_visible("#hint")
    page.click("#stop")
    page.wait_for_selector(FAILED, state="attached")
    assert page.evaluate("sent.length") == 1 and page.inner_text("#hint") == ""
    assert page.input_value("#question") == "Next?!!" and "stopped" in page.inner_text(".note")
    page.evaluate("document.querySelector('#limit').value = '0'")  # the settings are closed
    page.press("#question", "Enter")
    assert "whole number" in page.inner_text("#hint") and page.is_visible("#limit")
    assert page.evaluate("sent.length") == 1


def test_the_first_screen(page: Any) -> None:
    """Check two sentences and four examples, one with a schema, which can be changed."""
    assert len(re.findall(r"\.(?:\s|$)", page.inner_text("#welcome p"))) == 2
    examples = page.locator(".examples button")
    assert examples.count() == 4 and not page.is_visible("#schema")
    examples.nth(2).click()
    schema = json.loads(page.input_value("#schema"))
    assert 6 <= len(schema["properties"]) <= 8 and schema["required"] == list(schema["properties"])
    assert page.is_visible("#schema") and page.is_editable("#schema") and page.is_checked("#parallel")
    examples.nth(0).click()
    assert not page.is_visible("#schema") and page.input_value("#question").endswith("?")
    play(page, serial("so"), serial("so"))
    page.press("#question", "Enter")
    page.wait_for_selector(ANSWERED, state="attached")
    assert not page.is_visible("#welcome") and "response_format" not in page.evaluate("sent[0]")
    page.click("#anew")
    assert page.is_visible("#welcome") and page.locator(".turn").count() == 0


def test_decisions(page: Any) -> None:
    """Check the request of the example, the bars of its answer, and that it is no part of the conversation."""
    page.locator(".examples button").nth(3).click()
    assert page.is_visible("#questions") and not page.is_visible("#schema")
    shares = [{"value": "engineering", "probability": 0.7}, {"value": "billing", "probability": 0.3}]
    levels = [{"value": 0, "label": "calm", "probability": 0.2}, {"value": 1, "label": "<b>", "probability": 0.8}]
    answers = [
        {"type": "predicate", "probability": 0.9}, {"type": "choice", "choice": "engineering", "probabilities": shares},
        {"type": "score", "score": 0.8, "probabilities": levels},
    ]  # fmt: skip
    play(page, {"status": 200, "body": json.dumps({"answers": answers, "aspd": {"steps": 1}})})
    page.fill("#questions", "Is it so?\n\nWho? engineering | billing\nHow? calm < angry")
    page.press("#question", "Enter")
    page.wait_for_selector(ANSWERED, state="attached")
    sent = page.evaluate("sent[0]")
    assert sent["input"].startswith("Our nightly export") and sent["questions"] == [
        {"type": "predicate", "instructions": "Is it so?"},
        {"type": "choice", "instructions": "Who?", "choices": [{"value": "engineering"}, {"value": "billing"}]},
        {"type": "score", "instructions": "How?", "levels": [{"label": "calm"}, {"label": "angry"}]},
    ]
    bars = [box["width"] for box in (bar.bounding_box() for bar in page.locator(".option i").all()) if box]
    assert len(bars) == 6 and bars[2] / bars[3] == pytest.approx(7 / 3, rel=0.05)
    assert page.locator(".option.best span:first-child").all_inner_texts() == ["true", "engineering", "<b>"]
    assert "3 questions, 1 step" in page.inner_text(".figures") and page.evaluate("said.length") == 0
    page.fill("#questions", " ")
    put(page, "Now?", FAILED)
    assert "no questions" in page.inner_text(".error") and page.get_attribute("#questions", "aria-invalid") == "true"
    page.check("#structured")
    assert page.is_visible("#schema") and not page.is_visible("#questions") and not page.is_checked("#decided")


def end_of_text(page: Any) -> float:
    """Return the distance in pixels from the end of the first answer to the form; negative: it is hidden."""
    script = """() => document.querySelector("#form").getBoundingClientRect().top
      - document.querySelector(".answer > :last-child").getBoundingClientRect().bottom"""
    return float(page.evaluate(script))


def test_it_follows_what_is_new(page: Any) -> None:
    """Check that the page scrolls with new text until the reader scrolls up, and again from the end of the page."""
    page.set_viewport_size({"width": 800, "height": 500})
    play(page, {})
    put(page, end="")

    def grow() -> None:
        page.evaluate("text => push(text)", sse(delta("token", "line\n\n" * 40)))
        page.wait_for_timeout(300)

    grow()
    assert 0 <= end_of_text(page) < 40
    grow()
    assert 0 <= end_of_text(page) < 40 and page.evaluate("scrollY") > 1000
    assert page.evaluate("document.querySelector('.head').getBoundingClientRect().top") == 0  # the clock stays in sight
    page.mouse.move(300, 200)
    page.mouse.wheel(0, -600)
    page.wait_for_timeout(300)
    before = page.evaluate("scrollY")
    grow()
    assert page.evaluate("scrollY") == before and end_of_text(page) < -600
    page.mouse.wheel(0, 100_000)
    page.wait_for_timeout(300)
    grow()
    assert 0 <= end_of_text(page) < 40
    page.evaluate("text => push(text)", block(["A", "B"], ["one\n\n" * 60, "two"]))
    page.wait_for_timeout(300)
    place = page.evaluate("document.querySelector('.block').getBoundingClientRect().top")
    assert 0 < place < 150  # a block that is larger than the screen, from its beginning
    page.click("#stop")


def test_a_phone(page: Any) -> None:
    """Check that both answers stand side by side, in any state, within the width of the screen."""
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".examples button").nth(2).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    whole = "".join(leads()) + "}"
    play(
        page,
        {"stream": block(list(FIELDS), leads()) + sse(delta("token", "}")) + closing(9), "ends": True},
        serial(whole),
    )
    page.press("#question", "Enter")
    page.wait_for_selector(ANSWERED, state="attached")
    left, right = (page.locator(f"section.run:nth-child({side})").bounding_box() for side in (1, 2))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"] and left["width"] > 150
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
