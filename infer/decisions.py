"""Decisions: typed questions about one input, each answered alone with probabilities (protocol, section 5).

A question is a branch behind the input. It shows the options with labels, and its end asks for one of them; the answer
is the distribution over the labels there. K options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase
from typing import Literal, NamedTuple

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.tokens import TextCodec
from infer.request import Request, ScoredBranch

Kind = Literal["predicate", "choice", "score"]
Scores = Sequence[Sequence[float]]  # log probabilities of branches
Calibration = Literal["none", "orders", "prior"]  # one order of the options; several; and without the prior
MAX_OPTIONS = 255
MAX_QUESTIONS = 400
MAX_ORDERS = 8  # orders in which options are shown: rotations, evenly spaced if there are more options
MAX_ASKED = 1 << 20  # maximum tokens of all questions about an input, in all orders
MAX_PRIORS = 4096  # questions whose priors an engine keeps
NEUTRAL = "N/A"  # input without evidence, whose probabilities are the prior of a question
NO_THOUGHT = {"enable_thinking": False}  # variables of the chat template: the answer begins with a label
TRUE_FALSE = ("Yes", "No")  # labels of predicates


@dataclass(frozen=True)
class Option:
    """An option of a question.

    Attributes:
        value: value of the option; a string and a boolean of the same text differ.
        description: what the option means; empty: nothing is added.
    """

    value: str | bool
    description: str = ""

    @property
    def text(self) -> str:
        """Return the option as a question shows it."""
        name = self.value if isinstance(self.value, str) else str(self.value).lower()
        return f"{name}: {self.description}" if self.description else name


@dataclass(frozen=True)
class Question:
    """A question about an input.

    Attributes:
        kind: `predicate`: whether a statement is true; `choice`: one of the options; `score`: one of ordered levels.
        instructions: the question.
        options: options of a choice, or levels from the lowest to the highest; a predicate has none.
    """

    kind: Kind
    instructions: str
    options: tuple[Option, ...] = ()

    def __post_init__(self) -> None:
        values = [(type(option.value), option.value) for option in self.options]
        if self.kind == "predicate":
            if values:
                raise RequestError(f"options: expected none for a predicate, got {len(values)}.")
        elif not 2 <= len(values) <= MAX_OPTIONS:
            raise RequestError(f"options: expected 2 to {MAX_OPTIONS}, got {len(values)}.")
        elif len(set(values)) < len(values):
            twice = next(value for _, value in values if values.count((type(value), value)) > 1)
            raise RequestError(f"options: expected different values, got {twice!r} twice.")

    def variants(self, limit: int) -> list[tuple[str, list[str]]]:
        """Return the texts of the question, and the label of each option in them.

        Args:
            limit: maximum number of orders of the options.
        """
        if self.kind == "predicate":
            orders = [TRUE_FALSE, TRUE_FALSE[::-1]][:limit]
            return [(f"{self.instructions}\nAnswer {first} or {then}.", list(TRUE_FALSE)) for first, then in orders]
        count = len(self.options)
        names = labels(count)
        found = []
        for number in range(min(count, limit)):
            first = number * count // min(count, limit)
            order = [(first + place) % count for place in range(count)]
            lines = [f"{name}. {self.options[option].text}" for name, option in zip(names, order, strict=True)]
            text = "\n".join([self.instructions, *lines, "Answer with the letter only."])
            found.append((text, [names[(option - first) % count] for option in range(count)]))
        return found


@dataclass(frozen=True)
class Decision:
    """Answer to a question.

    Attributes:
        probabilities: probability of each option, or that a predicate is true and that it is false; their sum is 1.
        outside: probability, on average over the orders, that the model writes none of the labels.
    """

    probabilities: tuple[float, ...]
    outside: float

    @property
    def best(self) -> int:
        """Return the index of the likeliest option; the first of equals."""
        return int(np.argmax(self.probabilities))

    @property
    def confidence(self) -> float:
        """Return the probability of the likeliest option."""
        return max(self.probabilities)

    @property
    def score(self) -> float:
        """Return the mean index of the options."""
        return float(np.arange(len(self.probabilities)) @ np.asarray(self.probabilities))


class Labels(NamedTuple):
    """The places at which log probabilities of a question's labels are read. A label has one or several spellings.

    Attributes:
        branches: branches of one order of the options.
        spellings: spelling of which each log probability reads a token, in the order of the branches.
        options: option of each spelling.
    """

    branches: list[ScoredBranch]
    spellings: np.ndarray
    options: np.ndarray

    def read(self, scores: Iterator[Sequence[float]]) -> np.ndarray:
        """Return the log probability of each label, [K]; `scores`: those of the next branches."""
        tokens = np.concatenate([np.asarray(next(scores)) for _ in self.branches])
        found = np.full(self.options[-1] + 1, -np.inf)
        np.logaddexp.at(found, self.options, np.bincount(self.spellings, tokens))
        return found


def labels(count: int) -> list[str]:
    """Return different labels of equal length."""
    size = 1 if count <= len(ascii_uppercase) else 2
    return ["".join(letters) for letters in product(ascii_uppercase, repeat=size)][:count]


def read_labels(codec: TextCodec, lead: Sequence[int], names: Sequence[str]) -> Labels:
    """Return the branches that read labels behind a lead.

    Where every label is one token, also behind a space, one branch reads all of them. Otherwise labels that
    differ in their last token share a branch, which reads their tokens one after the other.
    """
    spelled = [[codec.encode_exactly(text) for text in (name, f" {name}")] for name in names]
    single = [sorted({ids[0] for ids in forms if len(ids) == 1}) for forms in spelled]
    if all(single):
        options = np.repeat(np.arange(len(names)), [len(ids) for ids in single])
        ids = tuple(token for tokens in single for token in tokens)
        return Labels([ScoredBranch(tuple(lead), (len(lead) - 1,) * len(ids), ids)], np.arange(len(ids)), options)
    groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}  # place, token and label, by all tokens but the last
    for number, (plain, _) in enumerate(spelled):
        groups.setdefault(tuple(plain[:-1]), []).extend(
            (len(lead) - 1 + k, token, number) for k, token in enumerate(plain)
        )
    branches, numbers = list[ScoredBranch](), list[int]()
    for before, reads in groups.items():
        places, tokens, read = zip(*sorted(reads), strict=True)
        branches.append(ScoredBranch((*lead, *before), places, tokens))
        numbers += read
    return Labels(branches, np.array(numbers), np.arange(len(names)))


class AskedInput(NamedTuple):
    """Different questions about one input.

    Attributes:
        request: request whose scores are those of all branches.
        labels: labels in each order of the options, by question.
    """

    request: Request
    labels: Mapping[Question, list[Labels]]

    def read(self, scores: Scores) -> dict[Question, np.ndarray]:
        """Return the log probability of each option in each order, [orders, K], by question."""
        rest = iter(scores)
        return {question: np.stack([order.read(rest) for order in orders]) for question, orders in self.labels.items()}


class Asked(NamedTuple):
    """Questions, and the requests whose scores answer them.

    Attributes:
        questions: the questions.
        asked: the input, and a neutral one for questions whose prior is not known.
        priors: known priors by question; None: they are not divided out.
    """

    questions: tuple[Question, ...]
    asked: list[AskedInput]
    priors: Mapping[Question, np.ndarray] | None


def decide(logprobs: np.ndarray, prior: np.ndarray | None = None) -> Decision:
    """Return the answer to a question.

    Args:
        logprobs: log probability of each option in each order, [orders, K].
        prior: those of a neutral input; None: they are not divided out.
    """
    mean = _mean(logprobs)
    if prior is not None:
        mean = mean - _mean(prior)
    shares = np.exp(mean - mean.max())
    inside = float(np.exp(logprobs).sum(axis=1).mean())
    return Decision(tuple((shares / shares.sum()).tolist()), max(0.0, 1.0 - inside))


def _mean(logprobs: np.ndarray) -> np.ndarray:
    """Return the logarithm of the probabilities among the options, [K], averaged over the orders."""
    return (logprobs - np.logaddexp.reduce(logprobs, axis=1, keepdims=True)).mean(axis=0)
