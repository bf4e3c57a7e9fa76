"""Any server with OpenAI's `/v1/completions`: vLLM, SGLang, llama.cpp's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import openai

from aspd_jax.configuration import at_least
from aspd_jax.errors import AspdError, ConfigError
from infer.request import PARAMETERS, SamplingParams

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


def sampling_arguments(params: SamplingParams, number: int) -> dict[str, object]:
    """Return the fields of a request to the upstream that hold sampling parameters, and those that make tags visible.

    Args:
        params: sampling parameters of the answer.
        number: number of the request among those of its answer; each has its own random stream.
    """
    arguments: dict[str, object] = {**WRITE_TAGS}
    for name, parameter in PARAMETERS.items():
        value = getattr(params, name)
        if parameter.proxy is not None and (parameter.proxy.always or value != parameter.default):
            arguments |= dict.fromkeys(parameter.proxy.names, value)
    return arguments if params.seed is None else arguments | {"seed": (params.seed + number) % (1 << 32)}


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
        sampling: SamplingParams,
        number: int,
    ) -> AsyncGenerator[tuple[str, str | None], None]:
        """Pieces of text as they come, each with the reason why it ends there, if it does.

        Args:
            prompt: token ids.
            most: tokens.
            stop: strings that end it and are no part of it.
            forbidden: tokens that are not sampled.
            sampling: sampling parameters of the answer.
            number: of the request among those of its answer.

        Raises:
            UpstreamError: it refuses, or fails so often that going on makes no sense.
        """
        bias: Mapping[str, int] = {str(token): -100 for token in forbidden}
        try:
            async with self._room:
                stream = await self._client.completions.create(
                    model=self.config.model, prompt=list(prompt), max_tokens=most, stop=list(stop), stream=True,
                    logit_bias=dict(bias), extra_body=sampling_arguments(sampling, number),
                )  # fmt: skip
                async with stream as pieces:  # whoever reads no further ends the request
                    async for piece in pieces:
                        if piece.choices:
                            yield piece.choices[0].text or "", piece.choices[0].finish_reason
        except openai.APIStatusError as error:
            raise UpstreamError(f"{self.config.url} answers {error.status_code}: {error.message}") from None
        except openai.APIError as error:
            raise UpstreamError(f"{self.config.url} fails: {error}") from None
