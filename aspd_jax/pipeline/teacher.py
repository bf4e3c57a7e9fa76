"""The annotating language model: calls with bounds, retries and an account; every reply is kept (spec, section 7)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aspd_jax.errors import ConfigError, DataError, RequestError
from aspd_jax.pipeline.config import TeacherSection
from aspd_jax.pipeline.store import Reply, Store

Made = TypeVar("Made")
PLACEHOLDERS = {
    "annotate": ("question", "answer"),
    "independence": ("question", "answer", "groups"),
    "agreement": ("question", "answer", "candidate"),
}
_STRING = {"type": "string"}


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _list(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


# JSON schemas of replies, as strict structured outputs want them: every field required, no others.
SCHEMAS = {
    "annotate": _object(
        items=_list(
            _object(
                type={"type": "string", "enum": ["serial", "parallel"]},
                text=_STRING,
                branches=_list(_object(title=_STRING, text=_STRING)),
            )
        )
    ),
    "independence": _object(groups=_list(_object(independent={"type": "boolean"}, reason=_STRING))),
    "agreement": _object(same={"type": "boolean"}, reason=_STRING),
}


class Unanswered(Exception):
    """The endpoint gave no reply to a call; the record is left for the next run."""


def read_prompts(folder: str) -> dict[str, str]:
    """The prompts, those of a user's folder before the project's own.

    Raises:
        ConfigError: the folder is missing, or a prompt lacks a placeholder.
    """
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"teacher.prompts: {folder} is no folder")
    prompts = {}
    for name, wanted in PLACEHOLDERS.items():
        own = Path(folder) / f"{name}.md"
        is_own = bool(folder) and own.is_file()
        prompts[name] = own.read_text() if is_own else (files(__package__) / "prompts" / f"{name}.md").read_text()
        for key in wanted:
            if f"{{{key}}}" not in prompts[name]:
                raise ConfigError(f"{own}: the prompt has no {{{key}}}, where the {key} should stand")
    return prompts


def fill(prompt: str, values: Mapping[str, str]) -> str:
    """A prompt with its placeholders filled, all at once: what is filled in may hold braces."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), prompt)


class _Takes(NamedTuple):
    """What an endpoint takes: forms of replies, the best first, and names of arguments."""

    forms: tuple[str, ...]
    limit: str = "max_tokens"
    optional: tuple[str, ...] = ("temperature", "seed")

    def arguments(self, kind: str, settings: TeacherSection, seed: int) -> dict[str, Any]:
        """Of a call."""
        every = {"temperature": settings.temperature, "seed": seed}
        arguments: dict[str, Any] = {name: every[name] for name in self.optional}
        arguments[self.limit] = settings.max_tokens
        if self.forms[0] == "schema":
            schema = {"name": kind, "strict": True, "schema": SCHEMAS[kind]}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.forms[0] == "object":
            arguments["response_format"] = {"type": "json_object"}
        return arguments

    def without(self, problem: str) -> _Takes | None:
        """What is left when an endpoint refuses a call; None where it says nothing that could be left out."""
        if self.limit in problem and "max_completion_tokens" in problem and self.limit != "max_completion_tokens":
            return self._replace(limit="max_completion_tokens")
        for name in self.optional:
            if name in problem:
                return self._replace(optional=tuple(other for other in self.optional if other != name))
        if len(self.forms) > 1 and re.search("response_format|schema|json|structured", problem, re.IGNORECASE):
            return self._replace(forms=self.forms[1:])
        return None


class Teacher:
    """Asks, and keeps what it is told."""

    def __init__(self, settings: TeacherSection, store: Store) -> None:
        import openai

        key = os.environ.get(settings.key_variable, "")
        self.settings, self.prompts = settings, read_prompts(settings.prompts)
        self._store = store
        forms = ("schema", "object", "none") if settings.schema == "auto" else (settings.schema,)
        self._takes = _Takes(forms)
        self._client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=key or "none",
            timeout=settings.timeout,
            max_retries=settings.retries,
        )
        self._room = asyncio.Semaphore(settings.concurrency)
        self._turn, self._next = asyncio.Lock(), 0.0
        self._failed_in_a_row = 0

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()

    async def ask(self, kind: str, values: Mapping[str, str], number: int, read: Callable[[Any], Made]) -> Made:
        """What `read` makes of a reply.

        Args:
            kind: of prompt and schema.
            values: for the placeholders.
            number: which of several equal questions this is.
            read: checks the JSON value of a reply; raises DataError where it has not the right form.

        Raises:
            DataError: no reply had the right form.
            Unanswered: the endpoint failed.
            RequestError: it refuses, or fails so often that going on makes no sense.
        """
        prompt = fill(self.prompts[kind], values)
        problem = ""
        for attempt in range(self.settings.attempts):
            reply = await self._reply(kind, prompt, number, attempt)
            try:
                return read(parse_json(reply.text))
            except DataError as error:
                problem = str(error)
        raise DataError(f"{problem} (after {self.settings.attempts} attempts)")

    async def _reply(self, kind: str, prompt: str, number: int, attempt: int) -> Reply:
        s = self.settings
        what = [s.model, s.temperature, s.max_tokens, kind, prompt, number, attempt]
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        reply = self._store.reply(key)
        if reply is None:
            async with self._room:
                await self._wait_for_turn()
                # A seed that a call always has, so that endpoints that honour it give the same reply.
                reply = await self._call(kind, prompt, int(key[:7], 16))
            self._store.add_reply(key, reply)
        return reply

    async def _wait_for_turn(self) -> None:
        if not self.settings.requests_per_minute:
            return
        async with self._turn:
            now = asyncio.get_running_loop().time()
            begin = max(now, self._next)
            self._next = begin + 60 / self.settings.requests_per_minute
        await asyncio.sleep(begin - now)

    async def _call(self, kind: str, prompt: str, seed: int) -> Reply:
        import openai

        s = self.settings
        while True:
            took = self._takes
            try:
                made = await self._client.chat.completions.create(
                    model=s.model,
                    messages=[{"role": "user", "content": prompt}],
                    **took.arguments(kind, s, seed),
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if took != self._takes:
                    continue  # a call beside this one has found out what the endpoint takes
                less = took.without(str(error))
                if less is None:
                    raise DataError(f"the endpoint does not take the call: {error}") from None
                self._takes = less
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise RequestError(
                    f"{s.base_url} refuses: {error}; see teacher.base_url, teacher.model and {s.key_variable}"
                ) from None
            except (openai.APIError, ValueError) as error:  # ValueError: a body that is no JSON
                self._fail(f"{type(error).__name__}: {error}")
            else:
                self._failed_in_a_row = 0
                choices = getattr(made, "choices", None) or []
                text = (choices[0].message.content or "") if choices and choices[0].message else ""
                usage = getattr(made, "usage", None)
                return Reply(text, getattr(usage, "prompt_tokens", 0) or 0, getattr(usage, "completion_tokens", 0) or 0)

    def _fail(self, problem: str) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.settings.give_up_after:
            raise RequestError(
                f"{self.settings.base_url} failed {self._failed_in_a_row} times in a row, at last with {problem}; "
                "what is done is kept, and the same command goes on"
            )
        raise Unanswered(problem)


def parse_json(text: str) -> Any:
    """The JSON object of a reply, code fences and words around it left out.

    Raises:
        DataError: there is none, or it is cut off.
    """
    first, last = text.find("{"), text.rfind("}")
    if first < 0:
        raise DataError(f"the reply holds no JSON: {text[:60]!r}")
    try:
        return json.loads(text[first : last + 1], strict=False)
    except json.JSONDecodeError as error:
        raise DataError(f"the reply's JSON is malformed or cut off: {error.msg} at character {error.pos}") from None
