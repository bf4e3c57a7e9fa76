"""One conversation by a client library: `python clients.py NAME URL`; prints the texts that it got as JSON.

It runs in an environment of its own (`make test-sdks`), so it imports nothing of the project.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Literal

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


def price_of(kind: Literal["pen", "cup"]) -> str:
    """Return the price of a good.

    Args:
        kind: the good.
    """
    return f"the price of a {kind} is 20"


def called(kind: object) -> str:
    """Return what a test compares: that the tool was called as its schema says."""
    assert kind in ("pen", "cup"), kind
    return "called"


def tools_of_instructor(url: str) -> list[str]:
    """The default mode, which is tools."""
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"))
    assert client.mode == instructor.Mode.TOOLS
    messages = [{"role": "user", "content": "Is 2+3=5?"}]
    asked = {"model": "demo", "messages": messages, "response_model": Reply, "temperature": 0, "max_retries": 1}
    reply = client.chat.completions.create(**asked)
    assert isinstance(reply, Reply)
    *_, last = client.chat.completions.create_partial(**asked)
    assert last.good == reply.good
    return ["called"]


def tools_of_pydantic_ai(url: str) -> list[str]:
    """The default output mode, which is tools, and an agent with a tool, by both interfaces."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")
    settings = {"temperature": 0, "parallel_tool_calls": False}
    done = []
    for model in (OpenAIChatModel("demo", provider=provider), OpenAIResponsesModel("demo", provider=provider)):
        reply = Agent(model, output_type=Reply, model_settings=settings).run_sync(QUESTION).output
        assert isinstance(reply, Reply)
        text = Agent(model, tools=[price_of], model_settings=settings).run_sync(QUESTION).output
        assert isinstance(text, str)
        done.append("called")
    return done


def tools_of_langchain(url: str) -> list[str]:
    """`bind_tools`: a call, whole and streamed, and its result; and structured output by calls."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    done = []
    for responses in (False, True):
        model = ChatOpenAI(
            model="demo", base_url=url, api_key="none", temperature=0, max_retries=0, use_responses_api=responses
        )
        bound = model.bind_tools([price_of], tool_choice="price_of")
        answer = bound.invoke(QUESTION)
        done.append(called(answer.tool_calls[0]["args"]["kind"]))
        whole = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None and whole.tool_calls[0]["args"] == answer.tool_calls[0]["args"]
        result = ToolMessage("20", tool_call_id=answer.tool_calls[0]["id"])
        model.bind_tools([price_of]).invoke([HumanMessage(QUESTION), answer, result])
        structured = model.with_structured_output(Reply, method="function_calling")
        assert isinstance(structured.invoke(QUESTION), Reply)
    return done


def tools_of_litellm(url: str) -> list[str]:
    """A call, whole and streamed, and its result."""
    import litellm

    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "temperature": 0, "num_retries": 0}
    schema = {"type": "object", "properties": {"kind": {"enum": ["pen", "cup"]}}, "required": ["kind"]}
    tools = [{"type": "function", "function": {"name": "price_of", "description": "a price", "parameters": schema}}]
    messages = [{"role": "user", "content": QUESTION}]
    required = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(messages=messages, **required, **asked).choices[0].message
    call = answer.tool_calls[0]
    chunks = list(litellm.completion(messages=messages, stream=True, **required, **asked))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "20"}
    litellm.completion(messages=[*messages, answer, result], tools=tools, **asked)
    return [called(json.loads(call.function.arguments)["kind"])]


def tools_of_agents(url: str) -> list[str]:
    """An agent that has to use a tool, and then answers: whole and streamed, by responses and by chat completions."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_default_openai_client,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    set_default_openai_client(client, use_for_tracing=False)
    settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
    kinds: list[object] = []

    @function_tool
    def price(kind: Literal["pen", "cup"]) -> str:
        kinds.append(kind)
        return price_of(kind)

    async def run() -> None:
        for model in ("demo", OpenAIChatCompletionsModel("demo", client)):
            agent = Agent(name="priced", model=model, model_settings=settings, tools=[price])
            assert (await Runner.run(agent, QUESTION)).final_output is not None
            streamed = Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output is not None

    asyncio.run(run())
    return [called(kind) for kind in kinds]


def tools_of_llm(url: str) -> list[str]:
    """`llm -T`: tools whose results go back to the model."""
    from llm.default_plugins.openai_models import Chat

    model = Chat("demo", model_name="demo", api_base=url, supports_tools=True)
    model.key = "none"
    for stream in (False, True):
        chain = model.chain(QUESTION, tools=[price_of], stream=stream, options={"temperature": 0})
        assert isinstance(chain.text(), str)
    return []


CLIENTS: dict[str, Callable[[str], list[str]]] = {
    name.removeprefix("with_"): function
    for name, function in list(globals().items())
    if name.startswith(("with_", "tools_of_"))
}

if __name__ == "__main__":
    os.environ["OPENAI_API_KEY"] = "none"
    print(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2])))
