"""Tokenizers of Hugging Face folders. Code from a folder is never run, and nothing prompts for input."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from aspd_jax.errors import CheckpointError
from aspd_jax.formats.side_files import check_content, read_object, read_text

log = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer needs one of them
SETTINGS = "tokenizer_config.json"
OBJECTS = (SETTINGS, "special_tokens_map.json", "added_tokens.json")
TEMPLATE = "chat_template.jinja"


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds files of a tokenizer."""
    return any((folder / name).exists() for name in (*VOCABULARIES, SETTINGS))


def read_tokenizer(folder: Path) -> Any:
    """Return the `transformers` tokenizer of a folder.

    Raises:
        CheckpointError: a file is missing or broken, or the tokenizer needs code from the folder.
    """
    objects = {name: read_object(folder / name) for name in OBJECTS if (folder / name).exists()}
    vocabularies = [name for name in VOCABULARIES if (folder / name).exists()]
    if not vocabularies:
        raise CheckpointError(f"{folder}: expected a tokenizer, got none of {', '.join(VOCABULARIES)}")
    for name in vocabularies:
        check_content(folder / name, "a tokenizer")
    if "tokenizer.json" in vocabularies:
        read_object(folder / "tokenizer.json")
    if (folder / TEMPLATE).exists():
        read_text(folder / TEMPLATE, "a chat template")
    settings = objects.get(SETTINGS, {})
    _check_settings(folder / SETTINGS, settings)
    with building(folder / vocabularies[0]):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.chat_template = tokenizer.chat_template or None
    check_template(folder / (TEMPLATE if (folder / TEMPLATE).exists() else SETTINGS), tokenizer)
    return tokenizer


@contextmanager
def building(file: Path) -> Iterator[None]:
    """Convert the errors of a library that builds a tokenizer.

    Raises:
        CheckpointError: the tokenizer in `file` is broken.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the `tokenizers` library raises no specific type
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file}: expected a tokenizer, got a broken one: {reason}") from None


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    name = settings.get("tokenizer_class")
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"{file}: tokenizer_class: expected a string, got {name!r}")
    if settings.get("auto_map") and (name is None or tokenizer_class_from_name(name) is None):
        raise CheckpointError(
            f"{file}: tokenizer_class: expected a class of transformers, got {name!r}. "
            "Code from the checkpoint (auto_map) is never run."
        )
    template = settings.get("chat_template")
    named = template if isinstance(template, list) else []
    whole = all(
        isinstance(item, dict) and all(isinstance(item.get(k), str) for k in ("name", "template")) for item in named
    )
    if template is not None and not (isinstance(template, (str, list)) and whole):
        raise CheckpointError(
            f"{file}: chat_template: expected a string or a list of objects with name and template, "
            f"got {type(template).__name__}"
        )
    length = settings.get("model_max_length")
    if length is not None and not (isinstance(length, (int, float)) and length > 0):
        raise CheckpointError(f"{file}: model_max_length: expected a number above 0, got {length!r}")


def check_template(file: Path, tokenizer: Any) -> None:
    """Check the syntax of the chat template in `file`; whether it accepts a conversation shows when it renders one.

    Raises:
        CheckpointError: it is not valid Jinja.
    """
    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"{file}: expected a Jinja chat template, got line {error.lineno}: {error}") from None
    except Exception as error:  # raised by the template for this conversation
        log.debug("%s: the chat template refuses an empty message: %s", file, error)
