"""One conversation by a client library: `python clients.py NAME URL`; prints the texts that it got as JSON.

It runs in an environment of its own (`make test-sdks`), so it imports nothing of the project.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

QUESTION = "Price each line.\n3 pens at $20"


class Reply(BaseModel):
    """An answer of a schema."""

    model_config = ConfigDict(extra="forbid")
    good: bool


class Anything(BaseModel):
    """An object that has no fields: JSON mode does not know the schema."""


def with_openai(url: str) -> list[str]:
    """Chat and responses: whole, streamed, parsed."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    parsed = client.chat.completions.parse(model="demo", messages=messages, temperature=0, response_format=Reply)
    assert isinstance(parsed.choices[0].message.parsed, Reply)
    with client.chat.completions.stream(model="demo", messages=messages, temperature=0) as stream:
        streamed = stream.get_final_completion()
    response = client.responses.create(model="demo", input=QUESTION, temperature=0)
    assert isinstance(
        client.responses.parse(model="demo", input=QUESTION, text_format=Reply, temperature=0).output_parsed, Reply
    )
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        final = stream.get_final_response()
    texts = [completion.choices[0].message.content for completion in (chat, streamed)]
    return [*texts, response.output_text, final.output_text]


def with_langchain(url: str) -> list[str]:
    """Chat and responses: invoke, stream, structured output."""
    from langchain_openai import ChatOpenAI

    texts = []
    for responses in (False, True):
        model = ChatOpenAI(
            model="demo", base_url=url, api_key="none", temperature=0, max_retries=0, use_responses_api=responses
        )
        texts += [model.invoke(QUESTION).text, "".join(chunk.text for chunk in model.stream(QUESTION))]
        assert isinstance(model.with_structured_output(Reply, method="json_schema").invoke(QUESTION), Reply)
    return [str(text) for text in texts]


def with_litellm(url: str) -> list[str]:
    """Chat: whole and streamed."""
    import litellm

    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "temperature": 0, "num_retries": 0}
    messages = [{"role": "user", "content": QUESTION}]
    whole = litellm.completion(messages=messages, **asked).choices[0].message.content
    chunks = litellm.completion(messages=messages, stream=True, **asked)
    return [whole, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


def with_instructor(url: str) -> list[str]:
    """JSON modes; there is no plain text."""
    import instructor
    from instructor.core import IncompleteOutputException
    from openai import OpenAI

    for mode, kind in ((instructor.Mode.JSON, Anything), (instructor.Mode.JSON_SCHEMA, Reply)):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        try:
            reply = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "Is 2+3=5?"}],
                response_model=kind,
                temperature=0,
                max_retries=1,
                max_tokens=60,
            )
        except IncompleteOutputException:  # the embedded model may not end an object that it is free to choose
            assert kind is Anything
        else:
            assert isinstance(reply, kind)
    return []


def with_pydantic_ai(url: str) -> list[str]:
    """An agent's text, by chat completions and by responses."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")
    models = (OpenAIChatModel("demo", provider=provider), OpenAIResponsesModel("demo", provider=provider))
    return [Agent(model, model_settings={"temperature": 0}).run_sync(QUESTION).output for model in models]


def with_agents(url: str) -> list[str]:
    """An agent of OpenAI's SDK, whose default is responses: whole and streamed."""
    from agents import Agent, ModelSettings, Runner, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key="none", max_retries=0), use_for_tracing=False)
    agent = Agent(name="plain", model="demo", model_settings=ModelSettings(temperature=0))

    async def run() -> list[str]:
        whole = await Runner.run(agent, QUESTION)
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        return [whole.final_output, streamed.final_output]

    return asyncio.run(run())


def with_llm(url: str) -> list[str]:
    """The library of the `llm` command."""
    from llm.default_plugins.openai_models import Chat

    model = Chat("demo", model_name="demo", api_base=url)
    model.key = "none"
    return [model.prompt(QUESTION, stream=stream, temperature=0).text() for stream in (False, True)]


CLIENTS: dict[str, Callable[[str], list[str]]] = {
    name.removeprefix("with_"): function for name, function in list(globals().items()) if name.startswith("with_")
}

if __name__ == "__main__":
    os.environ["OPENAI_API_KEY"] = "none"
    print(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2])))
