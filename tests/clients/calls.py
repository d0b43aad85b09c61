"""The quick starts of clients, against a running server: ``python calls.py CLIENT URL``. It runs in the environment of
the client (``run.py`` beside it), prints a line of JSON for each call, and imports nothing of ours."""

import asyncio
import base64
import io
import json
import sys
import urllib.request
from enum import Enum
from typing import Literal

from PIL import Image
from pydantic import BaseModel

MODEL, CLIENT, URL = "gpt-4o-mini", *sys.argv[1:3]
V1 = f"{URL}/v1"
HELLO = "Hello. Who are you?"
CITY = {"type": "object", "properties": {"city": {"enum": ["Cologne", "Porto"]}}, "required": ["city"]}
CITY = {**CITY, "additionalProperties": False}
MANUAL = " ".join(f"{CLIENT} says in sentence {i} that the answer is {i * 7}." for i in range(90))
BEFORE, AFTER = "Read this first, please. It is short.", "What is the answer in sentence 7?"


def data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png() -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(out, "PNG")
    return out.getvalue()


PNG, NOTE = png(), f"A note for {CLIENT}: the meeting is at noon.".encode()


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Person(BaseModel, extra="forbid"):
    """A person; a random model would not come to the end of further fields."""

    kind: Literal["child", "adult"]
    colour: Colour


def get_weather(city: Literal["Cologne", "Porto"]) -> str:
    """Weather of a city.

    Args:
        city: its name.
    """
    return f"rain in {city}"


def openai():
    import openai

    client = openai.OpenAI(base_url=V1, api_key="-", max_retries=0)
    chats, answers = client.chat.completions, client.responses
    user = lambda *parts: [
        {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}
    ]
    text = lambda text: {"type": "text", "text": text}
    chat = lambda messages, **fields: chats.create(
        model=MODEL, messages=messages, **{"max_tokens": 20} | fields
    )
    yield "chat", lambda: chat([{"role": "developer", "content": "Be brief."}, *user(HELLO)], temperature=0.7)
    yield "stream", lambda: list(chat(user(HELLO), stream=True, stream_options={"include_usage": True}))
    yield (
        "options",
        lambda: chat(
            user(HELLO),
            n=2,
            temperature=1,
            seed=1,
            presence_penalty=0.5,
            user="u",
            frequency_penalty=0.5,
            logit_bias={"50": -100},
            logprobs=True,
            top_logprobs=2,
        ),
    )
    yield "stored", lambda: chat(user(HELLO), store=True, metadata={"run": "1"}, service_tier="auto")
    function = {"name": "get_weather", "description": "Weather.", "parameters": CITY, "strict": None}
    tools = [{"type": "function", "function": function}]

    def loop():
        said = chat(user("Rain?"), tools=tools, tool_choice="required", max_tokens=200).choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}
        chat([*user("Rain?"), said, result], tools=tools, parallel_tool_calls=False)

    yield "tools", loop
    yield "parse", lambda: chats.parse(model=MODEL, messages=user("Who?"), response_format=Person)
    yield (
        "image",
        lambda: chat(user({"type": "image_url", "image_url": {"url": data("image/png", PNG)}}, text("?"))),
    )
    inline = {"type": "file", "file": {"filename": "note.txt", "file_data": data("text/plain", NOTE)}}
    yield "file inline", lambda: chat(user(inline, text("When?")))

    def upload():
        id = client.files.create(file=("note.txt", NOTE), purpose="user_data").id
        chat(user({"type": "file", "file": {"file_id": id}}, text("When?")))
        answers.create(model=MODEL, input=user({"type": "input_file", "file_id": id}), max_output_tokens=20)
        client.files.delete(id)

    yield "file uploaded", upload
    yield (
        "responses",
        lambda: answers.create(model=MODEL, input=HELLO, instructions="Be brief.", max_output_tokens=20),
    )
    yield (
        "responses stream",
        lambda: list(answers.create(model=MODEL, input=HELLO, stream=True, max_output_tokens=20)),
    )

    def responses_loop():
        tools = [
            {
                "type": "function",
                "strict": True,
                **{k: function[k] for k in ("name", "description", "parameters")},
            }
        ]
        first = answers.create(
            model=MODEL, input="Rain?", tools=tools, tool_choice="required", max_output_tokens=200
        )
        call = next(item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        more = {"model": MODEL, "tools": tools, "max_output_tokens": 20}
        answers.create(previous_response_id=first.id, input=[result], **more)
        answers.create(input=[*user("Rain?"), *first.output, result], store=False, **more)

    yield "responses tools", responses_loop
    yield "responses parse", lambda: answers.parse(model=MODEL, input="Who?", text_format=Person)
    picture = {"type": "input_image", "image_url": data("image/png", PNG)}
    yield "responses image", lambda: answers.create(model=MODEL, input=user(picture), max_output_tokens=20)
    yield (
        "responses logprobs",
        lambda: answers.create(
            model=MODEL,
            input=HELLO,
            top_logprobs=2,
            max_output_tokens=20,
            include=["message.output_text.logprobs"],
        ),
    )
    yield (
        "completions",
        lambda: client.completions.create(model=MODEL, prompt=HELLO, echo=True, max_tokens=20, best_of=1),
    )
    yield (
        "completions logprobs",
        lambda: client.completions.create(model=MODEL, prompt=HELLO, logprobs=2, max_tokens=20),
    )
    yield "models", lambda: client.models.retrieve(client.models.list().data[0].id)
    yield "manual", lambda: chat([{"role": "system", "content": MANUAL}, *user(AFTER)])
    yield "moved", lambda: chat([{"role": "system", "content": BEFORE}, *user(text(AFTER), text(MANUAL))])


def open_webui():
    """Bodies as its backend sends them: of chats, of a tool's turn, and of its title and follow-up tasks."""

    def send(messages, **fields):
        body = {"model": MODEL, "stream": True, "messages": messages, "max_tokens": 20, **fields}
        asked = urllib.request.Request(f"{V1}/chat/completions", json.dumps(body).encode())
        asked.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(asked) as answer:
            assert b"data: [DONE]" in answer.read() or not body["stream"]

    user = lambda content: {"role": "user", "content": content}
    rag = lambda text: (
        f'### Task:\nAnswer.\n<context>\n<source id="1" name="manual.txt">{text}</source>\n</context>\n'
    )
    call = {"id": "c", "index": 0, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    picture = [
        {"type": "text", "text": "?"},
        {"type": "image_url", "image_url": {"url": data("image/png", PNG)}},
    ]
    yield "chat", lambda: send([{"role": "system", "content": "Be brief."}, user(HELLO)])
    yield (
        "options",
        lambda: send(
            [user(HELLO)],
            temperature=0.8,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=1,
            logit_bias={},
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            stop=["END"],
        ),
    )
    yield "task", lambda: send([user("Title?")], stream=False, max_completion_tokens=20)
    yield "image", lambda: send([user(picture)])
    yield (
        "tools",
        lambda: send(
            [
                user("Rain?"),
                {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Well."},
                {"role": "tool", "tool_call_id": "c", "content": "rain"},
            ],
            tools=[{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}],
            tool_choice="auto",
        ),
    )
    yield "manual", lambda: send([user(rag(MANUAL) + AFTER)])
    yield (
        "moved",
        lambda: send([user(BEFORE), {"role": "assistant", "content": "Yes."}, user(AFTER + rag(MANUAL))]),
    )


def anthropic():
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="-", max_retries=0)
    user = lambda *parts: [
        {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}
    ]
    text = lambda text: {"type": "text", "text": text}
    ask = lambda messages, **fields: client.messages.create(
        model=MODEL, max_tokens=20, messages=messages, **fields
    )
    source = lambda kind, content: {
        "type": "base64",
        "media_type": kind,
        "data": base64.b64encode(content).decode(),
    }
    yield "message", lambda: ask(user(HELLO), system="Be brief.", metadata={"user_id": "u"})

    def stream():
        with client.messages.stream(model=MODEL, max_tokens=20, messages=user(HELLO)) as stream:
            stream.get_final_message()

    yield "stream", stream
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": CITY}

    def loop():
        said = client.messages.create(
            model=MODEL, max_tokens=200, messages=user("Rain?"), tools=[tool], tool_choice={"type": "any"}
        )
        call = next(block for block in said.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [text("rain")]}
        ask(
            [
                *user("Rain?"),
                {"role": "assistant", "content": said.content},
                {"role": "user", "content": [result]},
            ],
            tools=[tool],
        )

    yield "tools", loop
    yield (
        "tool runner",
        lambda: client.beta.messages.tool_runner(
            model=MODEL, max_tokens=20, messages=user("Rain?"), tools=[anthropic.beta_tool(get_weather)]
        ).until_done(),
    )
    yield (
        "parse",
        lambda: client.messages.parse(
            model=MODEL, max_tokens=200, messages=user("Who?"), output_format=Person
        ),
    )
    yield "image", lambda: ask(user({"type": "image", "source": source("image/png", PNG)}, text("?")))
    document = {"type": "text", "media_type": "text/plain", "data": NOTE.decode()}
    yield (
        "document",
        lambda: ask(user({"type": "document", "source": document, "title": "note"}, text("When?"))),
    )
    yield "count", lambda: client.messages.count_tokens(model=MODEL, messages=user(HELLO), system="Be brief.")
    yield (
        "beta",
        lambda: client.beta.messages.create(
            model=MODEL, max_tokens=20, messages=user(HELLO), betas=["prompt-caching-2024-07-31"]
        ),
    )
    yield "models", lambda: list(client.models.list())
    mark = {"cache_control": {"type": "ephemeral"}}
    yield "manual", lambda: ask(user(AFTER), system=[{**text(MANUAL), **mark}])
    yield "moved", lambda: ask(user(text(BEFORE), {**text(MANUAL), **mark}, text(AFTER)))


def _langchain(model, structured):
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool

    weather = tool(get_weather)
    picture = {"type": "image", "base64": base64.b64encode(PNG).decode(), "mime_type": "image/png"}
    yield "invoke", lambda: model().invoke([SystemMessage("Be brief."), HumanMessage(HELLO)])
    yield "stream", lambda: list(model().stream(HELLO))
    yield "batch", lambda: model(temperature=0.7).batch([HELLO, "Bye."])

    def loop():
        model().bind_tools([weather], tool_choice="any").invoke("Rain?")
        said = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Porto"}, "id": "c"}])
        model().bind_tools([weather]).invoke(
            [HumanMessage("Rain?"), said, ToolMessage("rain", tool_call_id="c")]
        )

    yield "tools", loop
    for method in structured:
        form = lambda method=method: model(max_tokens=300).with_structured_output(Person, method=method)
        yield f"structured {method}", lambda form=form: form().invoke("Who? Answer in JSON.")
    yield "image", lambda: model().invoke([HumanMessage([{"type": "text", "text": "?"}, picture])])
    yield "manual", lambda: model().invoke([SystemMessage(MANUAL), HumanMessage(AFTER)])
    yield "moved", lambda: model().invoke([SystemMessage(BEFORE), HumanMessage(AFTER), HumanMessage(MANUAL)])


def langchain_openai():
    from langchain_openai import ChatOpenAI

    make = lambda **fields: ChatOpenAI(
        model=MODEL, base_url=V1, api_key="-", max_retries=0, **{"max_tokens": 20} | fields
    )
    yield from _langchain(make, ("json_schema", "function_calling"))
    yield "responses", lambda: make(use_responses_api=True).invoke(HELLO)
    yield (
        "penalties",
        lambda: make(frequency_penalty=0.5, presence_penalty=0.5, seed=1, logprobs=True).invoke(HELLO),
    )


def langchain_anthropic():
    from langchain_anthropic import ChatAnthropic

    make = lambda **fields: ChatAnthropic(
        model=MODEL, base_url=URL, api_key="-", max_retries=0, **{"max_tokens": 20} | fields
    )
    yield from _langchain(make, ("function_calling", "json_schema"))


def langgraph():
    from langchain_core.messages import AIMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=MODEL, base_url=V1, api_key="-", max_retries=0, max_tokens=60)
    agent = create_react_agent(model, [get_weather], prompt="Be brief.", name="helper")
    call = {"name": "get_weather", "args": {"city": "Porto"}, "id": "c"}
    begun = [
        ("user", "Rain?"),
        AIMessage("", tool_calls=[call], name="helper"),
        ToolMessage("rain", tool_call_id="c"),
    ]
    yield "agent", lambda: agent.invoke({"messages": [("user", "Rain?")]})
    yield "second turn", lambda: agent.invoke({"messages": [*begun, ("user", "Sure?")]})
    yield "stream", lambda: list(agent.stream({"messages": [("user", "Rain?")]}, stream_mode="messages"))
    long = model.model_copy(update={"max_tokens": 300})
    formed = create_react_agent(long, [], response_format=Person)
    yield "response format", lambda: formed.invoke({"messages": [("user", "Who?")]})
    yield (
        "manual",
        lambda: create_react_agent(model, [], prompt=MANUAL).invoke({"messages": [("user", AFTER)]}),
    )
    yield (
        "moved",
        lambda: create_react_agent(model, [], prompt=BEFORE).invoke(
            {"messages": [("user", AFTER), ("assistant", "Where?"), ("user", MANUAL)]}
        ),
    )


def llama_index():
    from llama_index.core.base.llms.types import ToolCallBlock
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL,
        api_base=V1,
        api_key="-",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        max_tokens=60,
        context_window=60_000,
    )
    message = lambda content, role="user": ChatMessage(role=role, content=content)
    tool = FunctionTool.from_defaults(get_weather)
    yield "complete", lambda: llm.complete(HELLO)
    yield "chat", lambda: llm.chat([message("Be brief.", "system"), message(HELLO)])
    yield "stream", lambda: list(llm.stream_chat([message(HELLO)]))

    def loop():
        llm.chat_with_tools([tool], user_msg="Rain?", tool_required=True)
        call = ToolCallBlock(tool_call_id="c", tool_name="get_weather", tool_kwargs={"city": "Porto"})
        result = ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": "c"})
        said = ChatMessage(role="assistant", blocks=[call])
        llm.chat_with_tools([tool], chat_history=[message("Rain?"), said, result])

    yield "tools", loop
    long = llm.model_copy(update={"max_tokens": 300})
    yield "structured", lambda: long.as_structured_llm(Person).chat([message("Who?")])
    blocks = [ImageBlock(image=PNG, image_mimetype="image/png"), TextBlock(text="?")]
    yield "image", lambda: llm.chat([ChatMessage(role="user", blocks=blocks)])
    yield "text", lambda: OpenAILike(model=MODEL, api_base=V1, api_key="-", max_tokens=20).complete(HELLO)
    yield "manual", lambda: llm.chat([message(MANUAL, "system"), message(AFTER)])
    yield "moved", lambda: llm.chat([message(BEFORE, "system"), message(AFTER), message(MANUAL)])


def openai_agents():
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        short = "chat" if kind is agents.OpenAIChatCompletionsModel else "responses"
        model = lambda kind=kind: kind(
            model=MODEL, openai_client=AsyncOpenAI(base_url=V1, api_key="-", max_retries=0)
        )
        agent = lambda model=model, **fields: agents.Agent(
            name="helper", model=model(), **{"model_settings": agents.ModelSettings(max_tokens=60), **fields}
        )
        run = lambda agent, said=HELLO: agents.Runner.run_sync(agent, said, max_turns=3)
        yield f"{short}", lambda a=agent, r=run: r(a(instructions="Be brief."))
        default = agents.models.get_default_model_settings("gpt-5.1")
        default = {"model_settings": default.resolve(agents.ModelSettings(max_tokens=60))}
        yield f"{short} default settings", lambda a=agent, r=run, d=default: r(a(**d))
        required = agents.ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
        tools = {"tools": [agents.function_tool(get_weather)], "model_settings": required}
        yield f"{short} tools", lambda a=agent, r=run, t=tools: r(a(**t), "Rain?")
        formed = {"output_type": Person, "model_settings": agents.ModelSettings(max_tokens=300, store=True)}
        yield f"{short} output type", lambda a=agent, r=run, f=formed: r(a(**f), "Who?")
        yield f"{short} handoff", lambda a=agent, r=run: r(a(handoffs=[a()]))

        async def streamed(agent=agent):
            async for _ in agents.Runner.run_streamed(agent(), HELLO).stream_events():
                pass

        yield f"{short} stream", lambda s=streamed: asyncio.run(s())
        image = [{"role": "user", "content": [{"type": "input_image", "image_url": data("image/png", PNG)}]}]
        yield f"{short} image", lambda a=agent, r=run, i=image: r(a(), i)
    yield "manual", lambda: run(agent(instructions=MANUAL), AFTER)
    yield "moved", lambda: run(agent(instructions=BEFORE), AFTER + "\n<document>" + MANUAL + "</document>")


def pydantic_ai():
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    served = lambda: OpenAIProvider(base_url=V1, api_key="-")
    messages = lambda: AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=URL, api_key="-", max_retries=0)
    )
    for short, model in {
        "chat": lambda: OpenAIChatModel(MODEL, provider=served()),
        "responses": lambda: OpenAIResponsesModel(MODEL, provider=served()),
        "messages": lambda: AnthropicModel(MODEL, provider=messages()),
    }.items():
        agent = lambda model=model, **fields: Agent(
            model(), **{"model_settings": {"max_tokens": 60}, **fields}
        )
        yield f"{short}", lambda a=agent: a(instructions="Be brief.").run_sync(HELLO)
        yield f"{short} tools", lambda a=agent: a(tools=[get_weather]).run_sync("Rain?")
        yield (
            f"{short} output type",
            lambda a=agent: a(output_type=Person, model_settings={"max_tokens": 300}).run_sync("?"),
        )

        async def streamed(agent=agent):
            async with agent().run_stream(HELLO) as stream:
                await stream.get_output()

        yield f"{short} stream", lambda s=streamed: asyncio.run(s())
        yield (
            f"{short} image",
            lambda a=agent: a().run_sync(["?", BinaryContent(PNG, media_type="image/png")]),
        )
        yield (
            f"{short} document",
            lambda a=agent: a().run_sync(["?", BinaryContent(NOTE, media_type="text/plain")]),
        )
    yield "manual", lambda: agent(instructions=MANUAL).run_sync(AFTER)
    yield "moved", lambda: agent(instructions=BEFORE).run_sync([AFTER, f"<document>{MANUAL}</document>"])


def status_of(error: BaseException | None) -> int | None:
    """Return the status of HTTP behind an exception, if there is one."""
    while error is not None:
        for name in ("status_code", "code"):
            if isinstance(getattr(error, name, None), int):
                return getattr(error, name)
        error = error.__cause__ or error.__context__
    return None


def saved() -> int:
    with urllib.request.urlopen(f"{V1}/savings") as answer:
        return json.load(answer)["total"]["saved_tokens"]


def tokens() -> int:
    """Return the tokens of the manual."""
    asked = urllib.request.Request(f"{URL}/tokenize", json.dumps({"prompt": MANUAL}).encode())
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["count"]


def main() -> None:
    for name, call in globals()[CLIENT]():
        before = saved()
        line = {"call": name, "status": 200, "error": None}
        try:
            call()
        except Exception as error:
            line |= {"status": status_of(error), "error": f"{type(error).__name__}: {error}"[:500]}
        share = (saved() - before) / tokens() if name == "moved" else None
        print(json.dumps({**line, "reused": share}), flush=True)


if __name__ == "__main__":
    main()
