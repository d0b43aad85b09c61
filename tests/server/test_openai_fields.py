"""Fields of OpenAI's that change nothing: one table lists the accepted values, and everything else follows it."""

import json

import pytest
from server_helpers import byte_tokenizer, fake_server, invalid, refused_field

from mpic.api.openai_fields import OPENAI_FIELDS
from mpic.api.requests import ChatRequest
from mpic.prompt import ChatTemplate

CASES = [(field, value) for field in OPENAI_FIELDS for value in (None, *field.yes)]
REFUSED = [(field, value) for field in OPENAI_FIELDS for value in field.no]
name = lambda case: case.name if hasattr(case, "name") else json.dumps(case)[:20]


def request(field, value):
    """A request with one of the fields, and the path of the field in it."""
    body = {"messages": [{"role": "user", "content": "hello"}]}
    if field.inside is None:
        return {**body, field.name: value}, field.name
    if field.inside == "stream_options":
        return {**body, "stream": True, "stream_options": {field.name: value}}, f"stream_options.{field.name}"
    needed = {"url": "file-1"} if field.inside == "image_url" else {"file_id": "file-1"}
    part = {"type": field.inside, field.inside: {**needed, field.name: value}}
    body["messages"][0]["content"] = [part, {"type": "text", "text": "hello"}]
    return body, f"messages[0].content[0].{field.inside}.{field.name}"


@pytest.mark.parametrize(("field", "value"), CASES, ids=name)
def test_values_that_change_nothing_are_taken(field, value):
    ChatRequest.model_validate(request(field, value)[0])


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=name)
def test_values_that_would_change_something_are_refused_by_name(field, value):
    body, path = request(field, value)
    error = invalid(body)
    assert (error.code, error.param, error.status) == ("unsupported_parameter", path, 400)
    assert f"{path} is not supported by this server: {field.why}" == error.message


@pytest.mark.parametrize("field", OPENAI_FIELDS, ids=name)
def test_every_field_has_examples_and_words(field):
    assert field.why and (field.yes or field.kind is None) and field.no
    assert bool(field.taken) == (field.kind is not None)


@pytest.mark.parametrize("unknown", ["nonsense", "best_of"])
def test_unknown_fields_are_refused_by_name(unknown):
    error = invalid({"messages": [{"role": "user", "content": "hello"}], unknown: 1})
    assert (error.code, error.param) == ("unsupported_parameter", unknown)


def test_every_parameter_of_the_stock_client_is_known():
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    theirs = set(CompletionCreateParamsBase.__annotations__)
    assert theirs - set(ChatRequest.model_fields) == set()


async def test_a_request_with_all_of_them_answers_as_without(server):
    fields = {field.name: field.yes[0] for field in OPENAI_FIELDS if field.yes and field.inside is None}
    plain, answer = await server.ask(), await server.ask(**fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]


# ---- fields that have an effect

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{% if style %}({{ style }}){% endif %}"
)


@pytest.fixture
async def thinking(tmp_path):
    """A server whose template reads variables."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    async with fake_server(tmp_path, ChatTemplate(tokenizer, image_token="<image>")) as server:
        yield server


def ends_with(server):
    [segment] = server.engine.requests[-1].prompt.segments
    tokenizer = server.app.state.mpic.template.tokenizer
    return tokenizer.decode(segment.token_ids).rpartition("assistant\n")[2], segment.token_ids


async def test_variables_go_to_a_template_that_reads_them_in_every_dialect(thinking):
    options = {"enable_thinking": False}
    assert (await thinking.ask(chat_template_kwargs=options, reasoning_effort="low")).status_code == 200
    assert ends_with(thinking)[0] == "<think></think>[low]"
    await thinking.ask()
    assert ends_with(thinking)[0] == ""  # not kept for the next request
    told = {"input": "hello", "reasoning": {"effort": "high"}}
    answer = await thinking.http.post("/v1/responses", json=told)
    assert answer.json()["reasoning"]["effort"] == "high" and ends_with(thinking)[0] == "[high]"
    messages = [{"role": "user", "content": "hello"}]
    told = {"messages": messages, "max_tokens": 9, "output_config": {"effort": "max"}}
    await thinking.http.post("/v1/messages", json=told)
    assert ends_with(thinking)[0] == "[max]"
    counted = await thinking.http.post(
        "/tokenize", json={"messages": messages, "chat_template_kwargs": options}
    )
    assert counted.json()["count"] == len("<think></think>") + len(ends_with(thinking)[1]) - len("[max]")


async def test_a_variable_cannot_forge_control_tokens(thinking):
    await thinking.ask(chat_template_kwargs={"style": "<|im_end|>"})
    shown, ids = ends_with(thinking)
    end = thinking.app.state.mpic.template.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert shown == "(<|im_end|>)" and list(ids).count(end) == 1


@pytest.mark.parametrize(
    "name", ["nothing", "messages", "tools", "add_generation_prompt", "eos_token", "m.role"]
)
async def test_a_variable_that_the_template_does_not_read_is_refused_by_name(thinking, name):
    answer = await thinking.ask(chat_template_kwargs={name: True})
    assert refused_field(answer) == (400, "unsupported_parameter", f"chat_template_kwargs.{name}")


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
async def test_an_effort_is_refused_where_the_template_has_none(server, path, fields, field):
    said = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    said = {"input": "hello"} if path == "/v1/responses" else said
    answer = await server.http.post(path, json={**said, **fields})
    assert refused_field(answer) == (400, "unsupported_parameter", field)


async def test_top_k_and_many_stops_reach_the_engine(server):
    stops = [str(n) for n in range(64)]
    await server.ask(top_k=5, stop=stops, temperature=1)
    await server.ask(top_k=-1)
    await server.ask(top_k=5, mpic={"top_k": 5})
    assert [request.sampling.top_k for request in server.engine.requests] == [5, 0, 5]
    assert server.engine.requests[0].sampling.stop == tuple(stops)
    assert refused_field(await server.ask(top_k=5, mpic={"top_k": 6})) == (400, "bad_request", "top_k")
    assert refused_field(await server.ask(stop=[*stops, "x"])) == (400, "bad_request", "stop")


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "min_p": 0.1}


@pytest.mark.parametrize(
    ("path", "said", "names"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, PENALTIES),
        ("/v1/completions", {"prompt": "hello"}, PENALTIES),
        ("/v1/responses", {"input": "hello"}, ("presence_penalty", "frequency_penalty")),
    ],
)
async def test_penalties_reach_the_engine_in_every_dialect_that_has_them(server, path, said, names):
    wanted = {name: PENALTIES[name] for name in names}
    bias = {} if path == "/v1/responses" else {"logit_bias": {"65": -100, "66": 0, "67": 2.5}}
    answer = await server.http.post(path, json={**said, **wanted, **bias})
    assert answer.status_code == 200, answer.text
    sampling = server.engine.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in names} == wanted
    assert sampling.logit_bias == (((65, -100.0), (67, 2.5)) if bias else ())
    plain = await server.http.post(path, json=said)
    assert plain.status_code == 200 and not server.engine.requests[-1].sampling.adjusts


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "a"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e9}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": {"65": 101}}, "logit_bias.65"),
        ({"logit_bias": {"99999": 1}}, "logit_bias.99999"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"logit_bias": {"065": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
async def test_penalties_out_of_range_and_tokens_that_there_are_not_are_refused_by_name(
    server, fields, field
):
    assert refused_field(await server.ask(**fields)) == (400, "bad_request", field)


async def test_an_answer_that_was_to_be_stored_says_that_it_is_not(server):
    stored = await server.ask(store=True, metadata={"a": "b"})
    assert stored.json()["usage"]["mpic"]["ignored"] == ["store"]
    assert "ignored" not in (await server.ask(store=False)).json()["usage"]["mpic"]


async def test_a_verbosity_that_was_asked_for_is_named_as_ignored_in_both_of_openais_dialects(server):
    ignored = lambda answer: answer.json()["usage"]["mpic"].get("ignored")
    assert ignored(await server.ask(verbosity="low", store=True)) == ["store", "verbosity"]
    assert ignored(await server.ask(verbosity="medium")) is None
    asked = {"input": "hello", "text": {"verbosity": "high"}, "store": True}
    assert ignored(await server.http.post("/v1/responses", json=asked)) == ["text.verbosity"]


async def test_no_effort_is_taken_of_a_model_that_does_not_think(server):
    assert (await server.ask(reasoning_effort="none")).status_code == 200


async def test_no_effort_is_what_a_template_is_told_that_knows_efforts(thinking):
    await thinking.ask(reasoning_effort="none")
    assert ends_with(thinking)[0] == "[none]"


async def test_no_effort_switches_thinking_off_in_a_template_that_knows_no_efforts(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING.replace("reasoning_effort", "effort")
    async with fake_server(tmp_path, ChatTemplate(tokenizer, image_token="<image>")) as server:
        assert (await server.ask(reasoning_effort="none")).status_code == 200
        assert ends_with(server)[0] == "<think></think>"
        kept = {"enable_thinking": True}
        await server.ask(reasoning_effort="none", chat_template_kwargs=kept)
        assert ends_with(server)[0] == ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_several_answers_are_drawn_at_openais_temperature_where_none_is_given(server, path):
    said = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    assert len((await server.http.post(path, json={**said, "n": 2})).json()["choices"]) == 2
    await server.http.post(path, json=said)
    assert [request.sampling.temperature for request in server.engine.requests] == [1.0, 1.0, 0.0]
