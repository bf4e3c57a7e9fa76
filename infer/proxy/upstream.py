"""Client of a server with OpenAI's `/v1/completions`, such as vLLM, SGLang or llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import openai

from aspd_jax.configuration import at_least
from aspd_jax.errors import AspdError, ConfigError
from infer.request import PARAMETERS, SamplingParams

# Makes vLLM and SGLang include special tokens in the text; llama.cpp's server has an option for it.
WRITE_TAGS = {"skip_special_tokens": False, "spaces_between_special_tokens": False}


class UpstreamError(AspdError):
    """The upstream refuses a request or fails."""


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


class Upstream:
    """Client that requests completions of token ids."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
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
        forbidden: Sequence[int],
        sampling: SamplingParams,
        number: int,
        more: Mapping[str, object],
    ) -> AsyncGenerator[tuple[str, str | None], None]:
        """Request a completion and yield pieces of text, each with the finish reason or None.

        Args:
            prompt: token ids.
            limit: maximum tokens.
            stop: strings that end the completion and are not part of it.
            forbidden: ids of tokens that must not be sampled.
            sampling: sampling parameters.
            number: index of the request within its answer.
            more: further fields of the request.

        Raises:
            UpstreamError: the upstream refuses the request, fails after all retries, or ends the stream early.
        """
        bias: Mapping[str, int] = {str(token): -100 for token in forbidden}
        ended = False
        try:
            async with self._semaphore:
                stream = await self._client.completions.create(
                    model=self.config.model, prompt=list(prompt), max_tokens=limit, stop=list(stop), stream=True,
                    logit_bias=dict(bias), extra_body={**more, **sampling_arguments(sampling, number)},
                )  # fmt: skip
                async with stream as pieces:  # closing this generator cancels the request
                    async for piece in pieces:
                        if piece.choices:
                            ended |= piece.choices[0].finish_reason is not None
                            yield piece.choices[0].text or "", piece.choices[0].finish_reason
        except openai.APIStatusError as error:
            raise UpstreamError(f"{self.config.url}: status {error.status_code}: {error.message}") from None
        except openai.APIError as error:
            raise UpstreamError(f"{self.config.url}: {error}") from None
        except ValueError as error:
            raise UpstreamError(f"{self.config.url}: expected a stream of completions, got: {error}") from None
        if not ended:
            raise UpstreamError(f"{self.config.url}: expected a whole completion, got a stream without a finish_reason")
