"""Fields of records and of their messages, based on lists of known fields.

A field is read, known to have no effect, or refused by name: the text of a question is never dropped, and an answer
that its record excludes from the loss is never learned.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aspd_jax.errors import DataError

CONVERSATIONS = ("messages", "conversations", "conversation")
SYSTEMS = ("system", "system_prompt", "system_message")
QUESTIONS = ("question", "prompt", "instruction", "query", "input", "user", "problem", "inputs")
# A solution is the whole text of an answer; `answer` beside it is its last line.
ANSWERS = (
    "solution", "answer", "response", "output", "completion", "chosen", "assistant", "targets", "text"
)  # fmt: skip
CHOICES = ("choices", "options")
# Texts that a question refers to, with the form in which published loaders join them to a `question`: Axolotl
# (`context_qa`) and the LM Evaluation Harness (`boolq`). Other questions are instructions, which they follow.
CONTEXTS = {
    "context": "Context: {text}\nQuestion: {question}",
    "article": "{text}\n===\n{question}",
    "passage": "{text}\nQuestion: {question}",
}
IDS = ("id", "question_id", "uuid", "conversation_id")

# Whether an answer is learned: fields that are true for it, and fields that are false.
LEARNED = (
    "weight", "train", "training", "trainable", "learn", "loss", "loss_mask", "loss_weight", "calculate_loss", "label",
    "kto_tag", "desirable", "correct", "is_correct", "learned",
)  # fmt: skip
NOT_LEARNED = (
    "mask", "masked", "ignore", "ignored", "ignore_loss", "no_loss", "skip", "exclude", "excluded", "deleted",
    "truncated", "is_truncated",
)  # fmt: skip

# Fields that are no part of a conversation: names, origin, statistics, judgements, and answers of another use.
NEUTRAL = frozenset(
    [
        *IDS, "uid", "guid", "key", "line", "row", "number", "index", "idx", "sample", "hash", "name", "kind",
        "pipeline",
        "source", "sources", "origin", "dataset", "datasets", "subset", "split", "set", "url", "link", "license",
        "licence", "author", "authors", "annotator", "user_name", "language", "languages", "lang", "locale", "country",
        "category", "categories", "subcategory", "domain", "subdomain", "subject", "task", "tag", "tags", "type",
        "level", "difficulty", "ability", "style", "turn", "num_turns", "round", "rounds", "words", "list_items",
        "model", "models", "engine", "generator", "teacher", "judge", "temperature", "top_p", "top_k", "seed",
        "usage", "stats", "logprobs", "finish_reason", "stop_reason", "params", "generation_config",
        "metadata", "meta", "meta_data", "info", "extra", "extra_info", "annotations", "evaluation", "reward_model",
        "score", "scores", "score_chosen", "score_rejected", "margin", "rating", "ratings", "rank", "reward", "quality",
        "likes", "upvotes", "votes", "winner", "toxicity", "toxic", "redacted", "moderation", "openai_moderation",
        "detoxify", "synthetic", "review_count", "review_result", "tree_state", "emojis", "version", "revision",
        "timestamp", "created", "created_at", "updated_at", "date", "time", "tstamp", "embedding", "embeddings",
        "rejected", "expected_answer", "ground_truth", "gold", "final_answer", "correct_answer", "correct_answers",
        "incorrect_answers",
    ]
)  # fmt: skip
_NEUTRAL_ENDINGS = re.compile(  # but not of what a conversation of texts lacks
    r"(?!(?:\w*_)?(?:image|audio|video|picture|photo)s?_)\w+_(?:id|ids|idx|index|hash|url|date|time|timestamp|score|scores|rating|rank|count|length|len|words|chars|"
    r"tokens|source|model|lang|language|category|type|version|name|info|metadata|split|seed)"
    r"|__index_level_\d+__|Unnamed: \d+|"  # columns that pandas adds; the last one has no name
)
NEUTRAL_IN_MESSAGE = NEUTRAL | {"tool_call_id", "status", "markdown", "role_name"}


def is_empty(value: Any) -> bool:
    """Return whether a value of a field says nothing, as in a column that only other rows fill."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or value in ([], {}, ()) or (isinstance(value, float) and math.isnan(value))


def is_neutral(key: str) -> bool:
    """Return whether a field of a record has no effect on its conversation."""
    return key in NEUTRAL or _NEUTRAL_ENDINGS.fullmatch(key) is not None


def check_learned(fields: Mapping[str, Any], where: str) -> None:
    """Check that no field excludes an answer from the loss, or says that it was truncated.

    Args:
        fields: fields of a record or of an answer.
        where: place of the fields for messages, such as `messages[1].`; empty: the record.

    Raises:
        DataError: a field excludes it.
    """
    if fields.get("finish_reason") == "length":
        raise DataError(f'{where}finish_reason: expected a complete answer, got "length"')
    for keys, learned in ((LEARNED, True), (NOT_LEARNED, False)):
        for key in keys:
            if not is_empty(value := fields.get(key)) and not _says(value, learned):
                shown_key = f"{where}{key}" if where else f'"{key}"'
                raise DataError(
                    f"{shown_key}: expected {int(learned)} or {str(learned).lower()}, got {shown(value)}; every answer "
                    "is learned. Remove the answer or the record."
                )


def _says(value: Any, learned: bool) -> bool:
    """Return whether a flag, or each flag of a list, has a truth value; some files have it as text."""
    if isinstance(value, (list, tuple)):
        return all(_says(item, learned) for item in value)
    if isinstance(value, str):
        return value.strip().lower() in (("true", "1", "1.0") if learned else ("false", "0", "0.0"))
    return bool(value in (True, 1) if learned else value in (False, 0))


def check_message(turn: Mapping[str, Any], read: Collection[str], where: str) -> None:
    """Check that the fields of a message are known.

    Args:
        turn: the message.
        read: names of the fields that are read.
        where: place of the message.

    Raises:
        DataError: a field is unknown, or not supported.
    """
    for key, value in turn.items():
        known = key in read or key in NEUTRAL_IN_MESSAGE or key in LEARNED or key in NOT_LEARNED
        if not known and not _NEUTRAL_ENDINGS.fullmatch(str(key)) and not is_empty(value) and value is not False:
            raise DataError(f"{where}.{key}: expected none, got {shown(value)}")


def check_record(row: Mapping[str, Any], read: Collection[str], texts: Sequence[str]) -> None:
    """Check that a record has nothing that its conversation lacks.

    Args:
        row: the record.
        read: names of the fields of which the conversation is made.
        texts: texts of the messages.

    Raises:
        DataError: a field is unknown or not supported, and its text is not in the conversation.
    """
    for key, value in row.items():
        known = key in read or key in LEARNED or key in NOT_LEARNED or is_neutral(str(key))
        if not known and not is_empty(value) and not _is_copy(value, texts):
            raise DataError(
                f'"{key}": expected no content beside the conversation, got {shown(value)}. '
                'Put it into the question, remove it, or move it into "metadata".'
            )


def _is_copy(value: Any, texts: Sequence[str]) -> bool:
    """Return whether a text, or each message of a list, is in one of these texts, or contains all of them."""
    if isinstance(value, (list, tuple)):
        parts = [item.get("content", item.get("value")) if isinstance(item, Mapping) else item for item in value]
        return all(isinstance(part, str) and _is_copy(part, texts) for part in parts)
    if not isinstance(value, str):
        return False
    words = re.compile(rf"(?<!\w){re.escape(value.strip())}(?!\w)")
    return any(words.search(text) for text in texts) or all(text.strip() in value for text in texts)


def shown(value: Any) -> str:
    """Return a value as shortened JSON."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}…"
