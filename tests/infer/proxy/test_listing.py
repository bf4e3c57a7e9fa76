"""Lists in parallel over the proxy: an upstream that continues one text gives this text, whatever the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from aspd_jax import LanguageModel, load_model
from aspd_jax.structure import Parallel, from_json, plain_text
from infer.proxy.routes import Proxy, make_app
from infer.proxy.upstream import UpstreamConfig
from tests.infer.proxy.test_proxy import Served, Upstream, ask

ITEMS = ["1. **Sleep**: Eight hours.", "2. **Eat**: No sugar.", "3. **Walk**: Each day.\n   - or run"]
TEXT = "Tips:\n\n" + "\n\n".join(ITEMS) + "\n\nThat is all."
THREE = {"messages": [{"role": "user", "content": "Give me three tips."}]}
STATISTICS = {"aspd": {"statistics": True}}


class Writer(Upstream):
    """A model that writes one text: it continues its beginnings, leads on a scratch line, and single items."""

    def __init__(self, lm: LanguageModel, text: str, leads: tuple[str, ...] = ("Sleep", "Eat", "Walk")) -> None:
        super().__init__(lm)
        self.text, self.leads = text, leads

    def says(self, prompt: str) -> str:
        begun = self.text.partition("\n")[0]
        answer = prompt[prompt.rindex(begun) :] if begun in prompt else ""
        if self.text.strip() == answer.strip():
            return "END"
        if self.text.startswith(answer):
            return self.text[len(answer) :] + "END"
        if "..." in answer:  # the scratch line
            number = answer.count("...")
            return f"{self.leads[number]}**: not shown" if number < len(self.leads) else "Conclusion**: x"
        head = answer.rpartition("\n")[2]
        behind = self.text.partition(head)[2] if head in self.text else " alone"
        return behind + "END"


@contextmanager
def proxied(lm: LanguageModel, upstream: Upstream, **options: Any) -> Iterator[str]:
    with Served(upstream.app) as behind:
        config = UpstreamConfig(behind.url, "m", retries=0)
        app = make_app(Proxy(config, lm.tokenizer, lm.end_ids, "proxied", 512, forks=False, **options))
        with Served(app) as before:
            yield before.url


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return load_model("demo")


def test_a_list_is_written_in_parallel(demo: LanguageModel) -> None:
    writer = Writer(demo, TEXT)
    with proxied(demo, writer) as url:
        answer = ask(url, **THREE, **STATISTICS).json()
        assert answer["choices"][0]["message"]["content"] == TEXT and answer["choices"][0]["finish_reason"] == "stop"
        _, block, _ = from_json(answer["aspd"][0]["structure"])
        assert isinstance(block, Parallel) and [branch.title for branch in block.branches] == ["Sleep", "Eat", "Walk"]
        assert [branch.text.rstrip() for branch in block.branches] == ITEMS
        assert answer["usage"]["completion_tokens"] == len(demo.codec.text.encode(TEXT))
        # Text, two leads, three bodies, two joints, text behind the list.
        assert answer["aspd"][0]["statistics"]["requests"] == len(writer.bodies) == 1 + 2 + 3 + 2 + 1
        texts = [demo.tokenizer.decode(body["prompt"]) for body in writer.bodies]
        assert sum("..." in text for text in texts) == 2, "no body, joint or later text sees the outline"
        assert all(body["max_tokens"] > 0 for body in writer.bodies)
        client = openai.OpenAI(base_url=url, api_key="none")
        asked: Any = {"model": "proxied", **THREE, "stream": True}
        assert (
            "".join(piece.choices[0].delta.content or "" for piece in client.chat.completions.create(**asked)) == TEXT
        )
        writer.bodies.clear()
        serially = ask(url, **THREE, aspd={"lists": "serial", "statistics": True}).json()
        assert serially["choices"][0]["message"]["content"] == TEXT and len(writer.bodies) == 1


@pytest.mark.parametrize("limit", range(1, 90, 8))
def test_the_budget_cuts_the_same_text(limit: int, demo: LanguageModel) -> None:
    with proxied(demo, Writer(demo, TEXT)) as url:
        choice = ask(url, **THREE, max_tokens=limit).json()["choices"][0]
    text = choice["message"]["content"]
    assert TEXT.startswith(text) and (choice["finish_reason"] == "length") == (text != TEXT)


class Long(Writer):
    """A model whose first item has no end; behind a cut item it says `joint`."""

    joint = ""

    def says(self, prompt: str) -> str:
        return self.joint if self.bodies[-1]["max_tokens"] == 1 else super().says(prompt)


@pytest.mark.parametrize("joint", ["2. ", "END"], ids=["the list goes on", "the answer ends"])
def test_a_first_item_that_fills_the_budget_is_cut(joint: str, demo: LanguageModel) -> None:
    writer = Long(demo, "Tips:\n\n1. **Sleep**: " + "Eight hours. " * 100)
    writer.joint = joint
    with proxied(demo, writer) as url:
        reply = ask(url, **THREE, **STATISTICS, max_tokens=200)
        streamed = ask(url, **THREE, max_tokens=200, stream=True).text
    assert reply.status_code == 200 and "[DONE]" in streamed, reply.text
    choice = reply.json()["choices"][0]
    assert writer.text.startswith(choice["message"]["content"]) and choice["finish_reason"] == "length"
    assert reply.json()["aspd"][0]["statistics"]["requests"] > 3, "the list was decoded in parallel"


def test_the_model_ends_the_list(demo: LanguageModel) -> None:
    """Check a list that goes on with text, and one that ends the answer, after fewer items than leads."""
    for end in ("\n\nThat is all.", ""):
        text = "Tips:\n\n" + "\n\n".join(ITEMS[:2]) + end
        with proxied(demo, Writer(demo, text)) as url:
            answer = ask(url, messages=[{"role": "user", "content": "Give me tips."}], **STATISTICS).json()
        structure = from_json(answer["aspd"][0]["structure"])
        assert plain_text(structure) == answer["choices"][0]["message"]["content"] == text
        assert [len(part.branches) for part in structure if isinstance(part, Parallel)] == [2]


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("Write a program that prints tips.", TEXT),
        ("Give me three tips.", "Tips:\n\n```\n1. **Sleep**: x\n2. **Eat**: y\n```\nDone."),
        ("Give me three tips.", "There are none: neither 1. nor 2."),
    ],
)
def test_other_texts_are_serial(question: str, text: str, demo: LanguageModel) -> None:
    writer = Writer(demo, text)
    with proxied(demo, writer) as url:
        answer = ask(url, messages=[{"role": "user", "content": question}]).json()
    assert answer["choices"][0]["message"]["content"] == text and len(writer.bodies) == 1


@pytest.mark.parametrize("leads", [("Sleep", "Eat", "Walk"), ("Sleep", "Eat")], ids=["a list", "too few leads"])
def test_a_text_in_one_piece_is_read_to_its_end(leads: tuple[str, ...], demo: LanguageModel) -> None:
    writer = Writer(demo, TEXT, leads)
    writer.whole = True
    with proxied(demo, writer) as url:
        choice = ask(url, **THREE).json()["choices"][0]
    assert choice["message"]["content"] == TEXT and choice["finish_reason"] == "stop"


class Stubborn(Writer):
    """Repeats the first lead until its first token is barred; then it goes on, if `yields`."""

    yields = True

    def says(self, prompt: str) -> str:
        barred = self.yields and self.bodies[-1]["logit_bias"]
        return super().says(prompt) if "..." not in prompt or barred or prompt.count("...") > 1 else "Sleep**: again"


def test_a_repeated_lead_is_barred(demo: LanguageModel) -> None:
    for yields, tries in ((True, [0, 1, 0]), (False, [0, 1, 1, 1])):
        writer = Stubborn(demo, TEXT)
        writer.yields = yields
        with proxied(demo, writer) as url:
            answer = ask(url, **THREE, **STATISTICS).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert [len(body["logit_bias"]) for body in writer.bodies if body["max_tokens"] == 24] == tries
        assert any(isinstance(part, Parallel) for part in from_json(answer["aspd"][0]["structure"])) == yields
