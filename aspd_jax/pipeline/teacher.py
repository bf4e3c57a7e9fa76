"""The language model that annotates answers, and its prompts (protocol, section 7)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from aspd_jax.errors import ConfigError, DataError
from aspd_jax.pipeline.data_config import TeacherSection
from aspd_jax.pipeline.endpoint import Endpoint, Form, parse_json
from aspd_jax.pipeline.store import Store

Made = TypeVar("Made")
PLACEHOLDERS = {
    "annotate": ("question", "answer"),
    "independence": ("question", "answer", "groups"),
}
_STRING = {"type": "string"}
_NUMBER = {"type": "integer"}


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _list(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


# JSON schemas of replies. Strict structured outputs require all fields, and allow no others.
SCHEMAS = {
    "annotate": _object(groups=_list(_object(parts=_list(_object(first=_NUMBER, title=_STRING)), last=_NUMBER))),
    "independence": _object(groups=_list(_object(independent={"type": "boolean"}, reason=_STRING))),
}


def read_prompts(folder: str) -> dict[str, str]:
    """Return the prompts by name; files in a user's folder replace those of the project.

    Raises:
        ConfigError: the folder does not exist, or a prompt cannot be read or lacks a placeholder.
    """
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"teacher.prompts: expected a folder, got {folder}")
    prompts = {}
    for name, wanted in PLACEHOLDERS.items():
        own = Path(folder) / f"{name}.md"
        is_own = bool(folder) and own.is_file()
        try:
            prompts[name] = (own if is_own else files(__package__) / "prompts" / own.name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{own}: expected text in UTF-8, got: {error}") from None
        for key in wanted:
            if f"{{{key}}}" not in prompts[name]:
                raise ConfigError(f"{own}: expected the placeholder {{{key}}}, got none")
    return prompts


def fill(prompt: str, values: Mapping[str, str]) -> str:
    """Fill the placeholders of a prompt in one pass, because values may contain braces."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), prompt)


class Teacher:
    """Client that sends prompts to an endpoint and parses the replies.

    Attributes:
        settings: settings of the endpoint.
        prompts: prompts by name.
    """

    def __init__(self, settings: TeacherSection, store: Store) -> None:
        self.settings, self.prompts = settings, read_prompts(settings.prompts)
        self._endpoint = Endpoint(settings, store)

    async def close(self) -> None:
        """Close all connections."""
        await self._endpoint.close()

    @property
    def spent(self) -> dict[str, int]:
        """Return the numbers of answered calls and their tokens."""
        return self._endpoint.spent

    async def ask(self, kind: str, values: Mapping[str, str], number: int, read: Callable[[Any], Made]) -> Made:
        """Return the parsed reply to a prompt.

        Args:
            kind: name of the prompt and of its schema.
            values: values of the placeholders.
            number: index among equal questions.
            read: parser of the JSON value of a reply; raises DataError if its form is not valid.

        Raises:
            DataError: no reply has a valid form.
            Unanswered, RequestError: see `Endpoint.reply`.
        """
        messages = [{"role": "user", "content": fill(self.prompts[kind], values)}]
        problem = ""
        for attempt in range(self.settings.attempts):
            reply = await self._endpoint.reply(kind, messages, number, attempt, Form(kind, SCHEMAS[kind]))
            try:
                return read(parse_json(reply.text))
            except DataError as error:
                problem = str(error)
        raise DataError(f"{problem} (after {self.settings.attempts} attempts)")
