"""Any server with OpenAI's `/v1/completions`: vLLM, SGLang, llama.cpp's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import openai

from aspd_jax.configuration import at_least
from aspd_jax.errors import AspdError, ConfigError

# What makes servers write special tokens out: vLLM and SGLang take it with a request, llama.cpp's at its start.
WRITE_TAGS = {"skip_special_tokens": False, "spaces_between_special_tokens": False}


class UpstreamError(AspdError):
    """The upstream refuses, or fails."""


@dataclass(frozen=True)
class UpstreamConfig:
    """Where the model is served, and how it is asked.

    Attributes:
        url: of the upstream, up to `/v1`.
        model: its name there.
        key: API key; empty: none is sent.
        concurrency: requests at a time, of all answers together.
        retries: of a request that failed before anything came, with back-off.
        timeout: seconds between two pieces of an answer.
    """

    url: str
    model: str
    key: str = ""
    concurrency: int = 32
    retries: int = 4
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"the upstream must begin with http:// or https://, got {self.url!r}")
        at_least("concurrency", self.concurrency, 1)
        at_least("retries", self.retries, 0)
        if self.timeout <= 0:
            raise ConfigError(f"timeout must be more than 0 seconds, got {self.timeout}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, in OpenAI's words, with what the usual servers add to them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def arguments(self, number: int) -> dict[str, object]:
        """Of a request; every one of an answer, by its number, has a random stream of its own."""
        added: dict[str, object] = {**WRITE_TAGS}
        added |= {"top_k": self.top_k} if self.top_k else {}
        added |= {"min_p": self.min_p} if self.min_p else {}
        if self.repetition_penalty != 1.0:  # vLLM's name, and llama.cpp's
            added |= {"repetition_penalty": self.repetition_penalty, "repeat_penalty": self.repetition_penalty}
        found: dict[str, object] = {"temperature": self.temperature, "top_p": self.top_p, "extra_body": added}
        return found if self.seed is None else found | {"seed": (self.seed + number) % (1 << 32)}


class Upstream:
    """Asks for completions of token ids."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self._client = openai.AsyncOpenAI(
            base_url=config.url, api_key=config.key or "none", timeout=config.timeout, max_retries=config.retries
        )
        self._room = asyncio.Semaphore(config.concurrency)

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()

    async def complete(
        self,
        prompt: Sequence[int],
        most: int,
        stop: Sequence[str],
        forbidden: Sequence[int],
        sampling: Sampling,
        number: int,
    ) -> AsyncGenerator[tuple[str, str | None], None]:
        """Pieces of text as they come, each with the reason why it ends there, if it does.

        Args:
            most: tokens.
            stop: strings that end it and are no part of it.
            forbidden: tokens that are not sampled.
            number: of the request among those of its answer.

        Raises:
            UpstreamError: it refuses, or fails so often that going on makes no sense.
        """
        bias: Mapping[str, int] = {str(token): -100 for token in forbidden}
        try:
            async with self._room:
                stream = await self._client.completions.create(
                    model=self.config.model, prompt=list(prompt), max_tokens=most, stop=list(stop), stream=True,
                    logit_bias=dict(bias), **sampling.arguments(number),  # type: ignore[call-overload]
                )  # fmt: skip
                async with stream as pieces:  # whoever reads no further ends the request
                    async for piece in pieces:
                        if piece.choices:
                            yield piece.choices[0].text or "", piece.choices[0].finish_reason
        except openai.APIStatusError as error:
            raise UpstreamError(f"{self.config.url} answers {error.status_code}: {error.message}") from None
        except openai.APIError as error:
            raise UpstreamError(f"{self.config.url} fails: {error}") from None
