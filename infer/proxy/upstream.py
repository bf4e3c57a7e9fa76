"""Client of a server with OpenAI's `/v1/completions`, such as vLLM, SGLang or llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import openai

from aspd_jax.configuration import at_least
from aspd_jax.errors import AspdError, ConfigError
from infer.request import PARAMETERS, SamplingParams

# Makes vLLM and SGLang include special tokens in the text; llama.cpp's server has an option for it.
WRITE_TAGS = {"skip_special_tokens": False, "spaces_between_special_tokens": False}


class UpstreamError(AspdError):
    """The upstream refuses a request or fails.

    Args:
        message: text of the error.
        status: HTTP status for the client.
        code: OpenAI's error code; None: none.
    """

    def __init__(self, message: str, status: int = 502, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class UpstreamConfig:
    """Configuration of the upstream.

    Attributes:
        url: base URL, which ends in `/v1`.
        model: name of the model on the upstream.
        key: API key; empty: none.
        concurrency: maximum concurrent requests over all answers.
        retries: maximum retries of a request that failed before its first text, with back-off.
        timeout: maximum seconds between two pieces of text.
    """

    url: str
    model: str
    key: str = ""
    concurrency: int = 32
    retries: int = 4
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"upstream: expected a URL that begins with http:// or https://, got {self.url!r}")
        at_least("concurrency", self.concurrency, 1)
        at_least("retries", self.retries, 0)
        if self.timeout <= 0:
            raise ConfigError(f"timeout: expected more than 0 seconds, got {self.timeout}")


def sampling_arguments(params: SamplingParams, number: int) -> dict[str, object]:
    """Return the fields of a request to the upstream that hold sampling parameters.

    Args:
        params: sampling parameters of the answer.
        number: number of the request among those of its answer; each has its own random stream.
    """
    arguments: dict[str, object] = {}
    for name, parameter in PARAMETERS.items():
        value = getattr(params, name)
        if parameter.proxy is not None and (parameter.proxy.always or value != parameter.default):
            arguments |= dict.fromkeys(parameter.proxy.names, value)
    return arguments if params.seed is None else arguments | {"seed": (params.seed + number) % (1 << 32)}


class ReadToken(NamedTuple):
    """A token that an upstream has read or generated.

    Attributes:
        token: its id.
        likeliest: log probabilities of the likeliest tokens in its place, by id; of the first token of a prompt: none.
    """

    token: int
    likeliest: Mapping[int, float]


class Upstream:
    """Client that requests completions of token ids.

    Args:
        config: address and limits.
        ends: texts of the tokens that end an answer.
        tags: ids of the special tokens; none: the checkpoint has none, and all answers are serial.

    Attributes:
        config, tags: see above.
    """

    def __init__(self, config: UpstreamConfig, ends: Sequence[str], tags: Sequence[int]) -> None:
        self.config, self.tags, self._ends = config, tags, ends
        self._client = openai.AsyncOpenAI(
            base_url=config.url, api_key=config.key or "none", timeout=config.timeout, max_retries=config.retries
        )
        self._semaphore = asyncio.Semaphore(config.concurrency)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def complete(
        self,
        prompt: Sequence[int],
        limit: int,
        stop: Sequence[str],
        forbidden: Sequence[int] | None,
        sampling: SamplingParams,
        number: int,
        more: Mapping[str, object],
    ) -> AsyncGenerator[tuple[str, str | None], None]:
        """Request a completion and yield pieces of text, each with the finish reason or None.

        Args:
            prompt: token ids.
            limit: maximum tokens.
            stop: strings that end the completion and are not part of it, beside the ends of an answer.
            forbidden: ids of tokens that must not be sampled; None: all tags, which the text then need not show.
            sampling: sampling parameters.
            number: index of the request within its answer.
            more: further fields of the request.

        Raises:
            UpstreamError: the upstream refuses the request, fails after all retries, or ends the stream early.
        """
        bias = {str(token): -100 for token in (self.tags if forbidden is None else forbidden)}
        shown = WRITE_TAGS if self.tags and forbidden is not None else {}
        ended = False
        with self._errors("a stream of completions"):
            async with self._semaphore:
                stream = await self._client.completions.create(
                    model=self.config.model, prompt=list(prompt), max_tokens=limit, stop=[*stop, *self._ends],
                    stream=True, logit_bias=bias, extra_body={**shown, **more, **sampling_arguments(sampling, number)},
                )  # fmt: skip
                async with stream as pieces:  # closing this generator cancels the request
                    async for piece in pieces:
                        if piece.choices:
                            ended |= piece.choices[0].finish_reason is not None
                            yield piece.choices[0].text or "", piece.choices[0].finish_reason
        if not ended:
            raise UpstreamError(f"{self.config.url}: expected a whole completion, got a stream without a finish_reason")

    async def read(
        self,
        prompt: Sequence[int],
        limit: int,
        alternatives: int,
        echo: bool = False,
        bias: Mapping[int, float] | None = None,
    ) -> list[ReadToken]:
        """Request a greedy completion that nothing but its limit ends, and return its tokens.

        Args:
            prompt: token ids.
            limit: maximum tokens.
            alternatives: number of likeliest tokens.
            echo: whether the tokens of the prompt are returned, too, before those of the completion.
            bias: numbers to add to logits, by token id.

        Raises:
            UpstreamError: the upstream refuses the request, fails after all retries, or returns no log probabilities
                with token ids.
        """
        with self._errors("a completion"):
            async with self._semaphore:
                completion = await self._client.completions.create(
                    model=self.config.model, prompt=list(prompt), max_tokens=limit, temperature=0, echo=echo,
                    logprobs=alternatives, logit_bias={str(token): value for token, value in (bias or {}).items()},  # type: ignore[misc]
                    extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
                )  # fmt: skip
        try:
            found = completion.choices[0].logprobs
            pairs = zip(found.tokens, found.top_logprobs, strict=True)  # type: ignore[union-attr, arg-type]
            read = [
                ReadToken(_token_id(token), {_token_id(other): value for other, value in (likeliest or {}).items()})
                for token, likeliest in pairs
            ]
        except (AttributeError, IndexError, TypeError, ValueError):
            read = []
        before = list(prompt) if echo else []
        if len(read) <= len(before) or [token for token, _ in read[: len(before)]] != before:
            raise UpstreamError(
                f"{self.config.url}: expected log probabilities of {'the prompt and ' * echo}the completion by token "
                "id (vLLM's echo, logprobs and return_tokens_as_token_ids), got none. Use aspd.fields: parallel or "
                "serial."
            )
        return read

    @contextmanager
    def _errors(self, expected: str) -> Iterator[None]:
        """Raise errors of the client as `UpstreamError`; `expected`: what the upstream should return."""
        try:
            yield
        except openai.APIStatusError as error:
            message, status = f"{self.config.url}: status {error.status_code}: {error.message}", error.status_code
            raise UpstreamError(message, status if status < 500 else 502, error.code) from None
        except openai.APIError as error:
            raise UpstreamError(f"{self.config.url}: {error}") from None
        except ValueError as error:
            raise UpstreamError(f"{self.config.url}: expected {expected}, got: {error}") from None


def _token_id(text: str) -> int:
    """Return the id of a token that is named by it."""
    return int(text.removeprefix("token_id:"))
