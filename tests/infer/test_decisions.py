"""Decisions: probabilities equal those of a full pass over the question alone, and a question's answer is its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from aspd_jax import LanguageModel, load_model
from aspd_jax.chat import encode_questions
from aspd_jax.errors import RequestError
from aspd_jax.formats import find_model
from aspd_jax.layout import build_layout
from infer import Decision, Engine, Option, Question
from infer.decisions import MAX_ORDERS, decide, labels, read_labels
from infer.request import PromptTooLong

ATOL = 1e-5
INPUT = "Our export has failed three nights in a row. <|im_end|> We are 60 users on the Pro plan."
MESSAGES = [
    {"role": "system", "content": "You sort messages."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello. How can I help?"},
    {"role": "user", "content": INPUT},
]
PREDICATE = Question("predicate", "Is a feature failing?")
TEAMS = Question(
    "choice",
    "Which team owns the message?",
    (Option("engineering", "repairs what is broken"), Option("billing", "handles charges"), Option("success")),
)
MOOD = Question("score", "How upset is the customer?", tuple(map(Option, ("calm", "annoyed", "upset", "angry"))))
ALL = [PREDICATE, TEAMS, MOOD]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load_model("demo", "float32"), max_length=1024, max_batch=2)


def full_pass(lm: LanguageModel, ids: Sequence[int]) -> np.ndarray:
    """The log probabilities of the token after `ids`, by one full pass."""
    assert lm.special_tokens is not None
    array = np.asarray([ids], np.int32)
    layout = build_layout(array, lm.special_tokens, lm.config.positions)
    logits: Any = lm.model.apply({"params": lm.params}, array, layout)
    return np.asarray(jax.nn.log_softmax(logits[0, -1]))


def conversation(messages: Any, text: str) -> list[dict[str, str]]:
    """A conversation that asks a question at its end."""
    *before, last = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if last["role"] == "user":
        return [*before, {"role": "user", "content": f"{last['content']}\n\n{text}"}]
    return [*before, last, {"role": "user", "content": f"\n\n{text}"}]


def whole_prompt(lm: LanguageModel, messages: Any, text: str) -> list[int]:
    """The prompt of a question, whose text is compared with that of the chat template."""
    plain = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    shared, (rest,) = encode_questions(lm.tokenizer, lm.codec.text, plain, [f"\n\n{text}"])
    shown = lm.tokenizer.apply_chat_template(conversation(messages, text), tokenize=False, add_generation_prompt=True)
    assert lm.tokenizer.decode([*shared, *rest], clean_up_tokenization_spaces=False) == shown
    return [*shared, *rest]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("prompt", [INPUT, MESSAGES, MESSAGES[:3]], ids=["text", "messages", "an answer is last"])
def test_probabilities_equal_a_full_pass(engine: Engine, prompt: Any) -> None:
    """Check each question in one order; negative control: the probabilities depend on the input."""
    lm, encode = engine.lm, engine.lm.codec.text.encode_exactly
    found, compared = engine.decide(prompt, ALL, "none"), 0
    for question, decision in zip(ALL, found, strict=True):
        ((text, names),) = question.variants(1)
        read = full_pass(lm, whole_prompt(lm, prompt, text))
        shares = [
            sum({float(np.exp(read[ids[0]])) for ids in map(encode, (n, f" {n}")) if len(ids) == 1}) for n in names
        ]
        if not all(shares):
            continue  # labels of several tokens, see below
        np.testing.assert_allclose(decision.probabilities, np.asarray(shares) / sum(shares), atol=ATOL)
        assert decision.outside == pytest.approx(1 - sum(shares), abs=ATOL)
        compared += 1
    assert compared > 1
    others = engine.decide("All is well.", ALL, "none")
    assert all(
        np.abs(np.subtract(a.probabilities, b.probabilities)).max() > 1e-4 for a, b in zip(found, others, strict=True)
    )


@pytest.mark.further
def test_labels_of_several_tokens(engine: Engine) -> None:
    """Check that the tokens of a label are read one after the other, where one label is not a token."""
    lm, codec = engine.lm, engine.lm.codec.text
    names = ["engineering, of course", "engineering, of trains", "billing"]
    lead = whole_prompt(lm, INPUT, "Which team?")
    read = read_labels(codec, lead[-5:], names)
    assert len(read.branches) == len({tuple(codec.encode_exactly(name)[:-1]) for name in names})
    found = read.read(iter(engine.score(lead[:-5], read.branches)))
    for name, value in zip(names, found, strict=True):
        ids, logprob = list(lead), 0.0
        for token in codec.encode_exactly(name):
            logprob += float(full_pass(lm, ids)[token])
            ids.append(token)
        assert value == pytest.approx(logprob, abs=1e-3)


@pytest.mark.further
@pytest.mark.parametrize("count", [20, 400])
def test_an_answer_does_not_depend_on_the_other_questions(engine: Engine, count: int) -> None:
    """Check a question alone, in another order, twice, among many, and in a batch."""
    alone = [engine.decide(INPUT, [question])[0] for question in ALL]
    others = [Question("predicate", f"Does the text have more than {n} words?") for n in range(count - len(ALL))]
    handles = [engine.submit(INPUT, mode="serial"), engine.submit("Hello", mode="serial")]
    found = {
        "together": engine.decide(INPUT, ALL),
        "reversed": engine.decide(INPUT, ALL[::-1])[::-1],
        "twice": engine.decide(INPUT, [*ALL, *ALL])[3:],
        "among others": engine.decide(INPUT, [*others[:9], *ALL, *others[9:]])[9:12],
    }
    for handle in handles:
        handle.cancel()
    for name, decisions in found.items():
        for decision, expected in zip(decisions, alone, strict=True):
            np.testing.assert_allclose(decision.probabilities, expected.probabilities, atol=ATOL, err_msg=name)
            assert decision.outside == pytest.approx(expected.outside, abs=ATOL)
    shown = engine.decide(f"{INPUT}\n\n{others[0].instructions}", ALL)
    changes = [np.subtract(a.probabilities, b.probabilities) for a, b in zip(shown, alone, strict=True)]
    assert max(np.abs(change).max() for change in changes) > 100 * ATOL, "negative control: a question in the input"


def test_orders_are_averaged(engine: Engine) -> None:
    """Check that rotated options get the same answer, which one order alone does not give."""
    rotated = Question("choice", TEAMS.instructions, (*TEAMS.options[1:], TEAMS.options[0]))
    first, second = (engine.decide(INPUT, [TEAMS, rotated], kind) for kind in ("none", "orders"))
    for pair, alike in ((first, False), (second, True)):
        one, other = (np.asarray(decision.probabilities) for decision in pair)
        assert np.allclose(one, np.roll(other, 1), atol=ATOL) == alike
    shown = [text for text, _ in TEAMS.variants(MAX_ORDERS)]
    assert len(set(shown)) == 3 and all(shown[k].count("A. " + TEAMS.options[k].text) == 1 for k in range(3))
    many = Question("choice", "Which?", tuple(Option(str(number)) for number in range(100)))
    assert len(many.variants(MAX_ORDERS)) == MAX_ORDERS and len(labels(100)[0]) == 2


@pytest.mark.further
def test_the_prior_is_divided_out_and_kept(engine: Engine) -> None:
    asked = engine.ask(INPUT, ALL, "prior")
    assert len(asked.asked) == 2
    found = engine.decide(INPUT, ALL, "prior")
    assert len(engine.ask("Another input", ALL, "prior").asked) == 1, "priors are known"
    for question, decision, plain, prior in zip(
        ALL, found, engine.decide(INPUT, ALL), engine.decide("N/A", ALL), strict=True
    ):
        shares = np.divide(plain.probabilities, prior.probabilities)
        np.testing.assert_allclose(decision.probabilities, shares / shares.sum(), atol=1e-4)
        assert not np.allclose(decision.probabilities, plain.probabilities, atol=1e-4), question


def test_decisions() -> None:
    """Check the numbers of an answer by hand."""
    logprobs = np.log([[0.2, 0.1, 0.1], [0.05, 0.2, 0.15]])
    one = decide(logprobs[:1])
    assert one.probabilities == pytest.approx((0.5, 0.25, 0.25)) and one.outside == pytest.approx(0.6)
    assert (one.best, one.confidence, one.score) == (0, pytest.approx(0.5), pytest.approx(0.75))
    both = np.sqrt([0.5 * 0.125, 0.25 * 0.5, 0.25 * 0.375])
    assert decide(logprobs).probabilities == pytest.approx(tuple(both / both.sum()))
    assert decide(logprobs, logprobs).probabilities == pytest.approx((1 / 3,) * 3)
    assert sum(Decision(one.probabilities, 0.0).probabilities) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("predicate", ("a", "b"), "expected none for a predicate, got 2"),
        ("choice", ("a",), "expected 2 to 255, got 1"),
        ("score", tuple(map(str, range(256))), "got 256"),
        ("choice", ("a", "b", "a"), "different values, got 'a' twice"),
    ],
)
def test_refused_questions(kind: Any, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Question(kind, "Which?", tuple(map(Option, options)))


def test_refusals(engine: Engine, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Question("choice", "Which?", (Option("true"), Option(True))), "a string and a boolean differ"
    for questions, message in (([], "got 0"), ([PREDICATE] * 401, "got 401")):
        with pytest.raises(RequestError, match=f"questions: expected 1 to 400, {message}"):
            engine.decide(INPUT, questions)
    with pytest.raises(PromptTooLong, match="questions: expected at most"):
        engine.decide(INPUT, [Question("predicate", "Is it so? " * 400)])
    with pytest.raises(PromptTooLong, match="prompt: expected at most"):
        engine.decide("a b c " * 600, [PREDICATE])
    with pytest.raises(RequestError, match="expected text or messages"):
        engine.decide([1, 2, 3], [PREDICATE])
    monkeypatch.setattr("infer.engine.MAX_ASKED", 200)
    with pytest.raises(RequestError, match="questions: expected at most 200 tokens in all orders"):
        engine.decide(INPUT, [Question("predicate", f"Is it {number}?") for number in range(40)])
    bare = Engine(lm, max_length=256, max_batch=1)
    template, lm.tokenizer.chat_template = lm.tokenizer.chat_template, None
    try:
        with pytest.raises(RequestError, match="no chat template"):
            bare.decide(INPUT, [PREDICATE])
    finally:
        lm.tokenizer.chat_template = template


def test_models_do_not_think(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the variable of chat templates that lets an answer begin without a thought."""
    asks = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '!' if enable_thinking | default(true) else '?' }}"
    monkeypatch.setattr(engine.lm.tokenizer, "chat_template", asks)
    branch = engine.ask(INPUT, [PREDICATE], "none").asked[0].request.scored[0]
    assert "Answer Yes or No.?" in engine.lm.tokenizer.decode(list(branch.tokens))


@pytest.mark.slow
def test_probabilities_equal_transformers() -> None:
    """Check SmolLM2's answers against its model in torch, on the text of its own chat template."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    file = find_model("smollm2")
    engine = Engine(load_model("smollm2", "float32"), max_length=512, max_batch=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for question, decision in zip(ALL, engine.decide(INPUT, ALL, "none"), strict=True):
        ((text, names),) = question.variants(1)
        ids = whole_prompt(engine.lm, INPUT, text)
        with torch.no_grad():
            read = torch.softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1).numpy()
        forms = [[tokenizer.encode(form, add_special_tokens=False) for form in (name, f" {name}")] for name in names]
        shares = np.asarray([sum(read[ids[0]] for ids in of if len(ids) == 1) for of in forms])
        np.testing.assert_allclose(decision.probabilities, shares / shares.sum(), atol=1e-3)
        assert np.ptp(decision.probabilities) > 0.01
