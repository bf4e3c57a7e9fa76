"""Client of an endpoint with OpenAI's chat completions: limited concurrency, retries, and stored replies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from aspd_jax.errors import DataError, RequestError
from aspd_jax.pipeline.data_config import TeacherSection
from aspd_jax.pipeline.store import Reply, Store


class Unanswered(Exception):
    """The endpoint did not reply to a call; the work that needs the reply is left for the next run."""


class Form(NamedTuple):
    """The required form of a reply.

    Attributes:
        name: name of the schema.
        schema: JSON schema that meets the rules of strict structured outputs.
    """

    name: str
    schema: dict[str, Any]


def parse_json(text: str) -> Any:
    """Return the JSON object of a reply, ignoring code fences and text around it.

    Raises:
        DataError: the reply contains no JSON object, or one that is malformed or cut off.
    """
    first, last = text.find("{"), text.rfind("}")
    if first < 0:
        raise DataError(f"reply: expected JSON, got {text[:60]!r}")
    try:
        return json.loads(text[first : last + 1], strict=False)
    except json.JSONDecodeError as error:
        raise DataError(f"reply: expected valid JSON, got {error.msg} at character {error.pos}") from None


class _Takes(NamedTuple):
    """Features that an endpoint supports.

    Attributes:
        forms: supported forms of replies, in order of preference.
        limit: name of the argument for the maximum number of tokens.
        optional: names of the optional arguments.
    """

    forms: tuple[str, ...]
    limit: str = "max_tokens"
    optional: tuple[str, ...] = ("temperature", "seed")

    def arguments(self, settings: TeacherSection, form: Form, seed: int) -> dict[str, Any]:
        """Return the arguments of a call."""
        available = {"temperature": settings.temperature, "seed": seed}
        arguments: dict[str, Any] = {name: available[name] for name in self.optional}
        arguments[self.limit] = settings.max_tokens
        if self.forms[0] == "schema":
            schema = {"name": form.name, "strict": True, "schema": form.schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.forms[0] == "object":
            arguments["response_format"] = {"type": "json_object"}
        return arguments

    def without(self, problem: str) -> _Takes | None:
        """Return the features without the one that an error message names; None if it names none."""
        if self.limit in problem and "max_completion_tokens" in problem and self.limit != "max_completion_tokens":
            return self._replace(limit="max_completion_tokens")
        for name in self.optional:
            if name in problem:
                return self._replace(optional=tuple(other for other in self.optional if other != name))
        if len(self.forms) > 1 and re.search("response_format|schema|json|structured", problem, re.IGNORECASE):
            return self._replace(forms=self.forms[1:])
        return None


class Endpoint:
    """Client that sends conversations to an endpoint and stores the replies.

    Args:
        settings: settings of the endpoint.
        store: store of replies; a call with a stored reply is not repeated.

    Attributes:
        settings: settings of the endpoint.
        spent: numbers of calls and tokens of this object, without stored replies, for a progress bar.
    """

    def __init__(self, settings: TeacherSection, store: Store) -> None:
        import openai

        key = os.environ.get(settings.key_variable, "")
        self.settings = settings
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
        self.spent = {"calls": 0, "tokens": 0}

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def reply(
        self, kind: str, messages: Sequence[dict[str, str]], number: int, attempt: int, form: Form
    ) -> Reply:
        """Return the reply to a conversation, from the store if possible.

        Args:
            kind: kind of the question; part of the key in the store.
            messages: messages with `role` and `content`.
            number: index among equal questions; part of the key.
            attempt: index of the attempt at a reply of the required form; part of the key.
            form: required form of the reply.

        Raises:
            DataError: the endpoint does not accept the call.
            Unanswered: the call failed.
            RequestError: the endpoint refuses all calls, or too many consecutive calls failed.
        """
        s = self.settings
        question: Any = messages[0]["content"] if len(messages) == 1 else list(messages)
        what = [s.model, s.temperature, s.max_tokens, kind, question, number, attempt]
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        reply = self._store.reply(key)
        if reply is None:
            async with self._room:
                await self._wait_for_turn()
                # The seed depends on the call only, so that endpoints that support seeds repeat their reply.
                reply = await self._call(messages, form, int(key[:7], 16))
            self._store.add_reply(key, reply)
            self.spent["calls"] += 1
            self.spent["tokens"] += reply.prompt_tokens + reply.completion_tokens
        return reply

    async def _wait_for_turn(self) -> None:
        if not self.settings.requests_per_minute:
            return
        async with self._turn:
            now = asyncio.get_running_loop().time()
            begin = max(now, self._next)
            self._next = begin + 60 / self.settings.requests_per_minute
        await asyncio.sleep(begin - now)

    async def _call(self, messages: Sequence[dict[str, str]], form: Form, seed: int) -> Reply:
        import openai

        s = self.settings
        while True:
            features = self._takes
            try:
                response = await self._client.chat.completions.create(
                    model=s.model,
                    messages=cast(Any, messages),
                    **features.arguments(s, form, seed),
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if features != self._takes:
                    continue  # a concurrent call has updated the supported features
                reduced = features.without(str(error))
                if reduced is None:
                    raise DataError(f"the endpoint does not accept the call: {error}") from None
                self._takes = reduced
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise RequestError(
                    f"{s.base_url} refuses: {error}; see teacher.base_url, teacher.model and {s.key_variable}"
                ) from None
            except (openai.APIError, ValueError) as error:  # ValueError: the body is not JSON
                self._fail(f"{type(error).__name__}: {error}")
            else:
                self._failed_in_a_row = 0
                choices = getattr(response, "choices", None) or []
                text = (choices[0].message.content or "") if choices and choices[0].message else ""
                usage = getattr(response, "usage", None)
                return Reply(text, getattr(usage, "prompt_tokens", 0) or 0, getattr(usage, "completion_tokens", 0) or 0)

    def _fail(self, problem: str) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.settings.give_up_after:
            raise RequestError(
                f"{self.settings.base_url}: expected replies, got {self._failed_in_a_row} errors in a row: {problem}. "
                "Results so far are stored; run the same command to resume."
            )
        raise Unanswered(problem)
