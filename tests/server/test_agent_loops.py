"""Loops of agents as the stock clients write them, over a loopback server: what an answer holds goes back as it came,
with the result of the tool that it calls."""

import json

import anthropic
import openai
import pytest
from chat_models import processor
from fake_engine import FakeEngine
from front_server import front_server

from mpic.config import ServerConfig
from mpic.prompt import ChatTemplate

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Scripted(FakeEngine):
    """Calls a tool twice, then answers with words."""

    def submit(self, request):
        self.answer = (f"One moment. {CALL}", CALL, "It rains.")[len(self.requests) % 3]
        return super().submit(request)


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    template = ChatTemplate(processor("qwen3"))
    engine = Scripted(context=10_000, pool=10_000)
    limits = ServerConfig(log_level="warning")
    with front_server(tmp_path_factory.mktemp("agents"), template, limits, engine=engine) as front:
        yield front


@pytest.fixture(autouse=True)
def whole_script(front):
    """Every test runs the script once, and its last prompt has all that was said before."""
    front.engine.requests.clear()
    yield
    assert len(front.engine.requests) == 3
    decode = ChatTemplate(processor("qwen3")).tokenizer.decode
    last = "".join(decode(part.token_ids) for part in front.engine.requests[-1].prompt.segments)
    assert last.count(CALL) == 2 and last.count("<tool_response>\nrain in Köln\n</tool_response>") == 2
    assert last.index("One moment.") < last.index(CALL)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_runner(front, stream):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name.
        """
        return f"rain in {city}"

    url = f"http://127.0.0.1:{front.port}"
    with anthropic.Anthropic(base_url=url, api_key=front.key, max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="fake",
            max_tokens=100,
            system=[{"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[get_weather],
            **({"stream": True} if stream else {}),
        )
        said = [one.get_final_message() if stream else one for one in runner]
    assert [one.stop_reason for one in said] == ["tool_use", "tool_use", "end_turn"]
    assert said[-1].content[0].text == "It rains."


def connected(front):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{front.port}/v1", api_key=front.key, max_retries=0)


def weather(arguments):
    return f"rain in {json.loads(arguments)['city']}"


@pytest.mark.parametrize("by", ["items", "previous_response_id"])
def test_openai_responses(front, by):
    tools = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
    items = [{"role": "user", "content": "Weather?"}]
    with connected(front) as client:
        response = client.responses.create(model="fake", input=items, tools=tools)
        while calls := [item for item in response.output if item.type == "function_call"]:
            results = [
                {"type": "function_call_output", "call_id": c.call_id, "output": weather(c.arguments)}
                for c in calls
            ]
            if by == "items":
                items += [*response.output, *results]
                response = client.responses.create(model="fake", input=items, tools=tools, store=False)
            else:
                response = client.responses.create(
                    model="fake", input=results, tools=tools, previous_response_id=response.id
                )
        assert response.output_text == "It rains."


def test_openai_chat(front):
    function = {"name": "get_weather", "parameters": SCHEMA}
    messages = [{"role": "user", "content": "Weather?", "name": "ann"}]
    with connected(front) as client:
        while True:
            answer = client.chat.completions.create(
                model="fake",
                messages=messages,
                tools=[{"type": "function", "function": function}],
                parallel_tool_calls=False,
                user="ann",
                store=False,
                metadata={"a": "b"},
            )
            said = answer.choices[0].message
            if not said.tool_calls:
                break
            messages.append(said)
            for call in said.tool_calls:
                result = weather(call.function.arguments)
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": result, "name": "get_weather"}
                )
        assert said.content == "It rains."
