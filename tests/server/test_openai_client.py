"""The stock ``openai`` client against a running server with API keys: all of its features that we serve, and its own
exception classes for every kind of refusal."""

import itertools

import openai
import pytest
from server_helpers import data_url, png
from threads_kit import in_threads

from mpic.keys import KeyLimits

names = itertools.count()


@pytest.fixture
def connect(keyed):
    """Make a client for a user with a new key."""
    url, keys = keyed
    made = []

    def connect(user="alice", **limits):
        secret, key = keys.create(user, limits=KeyLimits(**limits))
        made.append(openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0))
        made[-1].prefix = key.prefix
        return made[-1]

    yield connect
    for client in made:
        client.close()


def ask(client, content, **options):
    options = {"model": "tiny", "max_tokens": 6, **options}
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **options)


def picture(url):
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]


# ---- files


def test_create_list_retrieve_wait_content_delete(connect):
    client = connect(f"files-{next(names)}")
    made = client.files.create(
        file=("red.png", png()), purpose="vision", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.object == "file" and made.status in ("uploaded", "processed")
    done = client.files.wait_for_processing(made.id, poll_interval=0.02)
    assert (done.status, done.purpose, done.bytes) == ("processed", "vision", len(png()))
    assert client.files.retrieve(made.id).filename == "red.png"
    assert done.expires_at - done.created_at in (3600, 3601)
    ours = done.model_extra
    assert (ours["kind"], ours["tokens"], ours["state"], ours["tiers"]) == ("image", 16, "ready", ["disk"])
    other = client.files.create(file=b"plain words", purpose="user_data")
    assert [f.id for f in client.files.list(order="asc")] == [made.id, other.id]
    assert [f.id for f in client.files.list(limit=1)] == [other.id, made.id]  # pages are walked
    assert [f.id for f in client.files.list(purpose="vision")] == [made.id]
    assert client.files.content(made.id).read() == png()
    assert client.files.delete(other.id).deleted
    assert [f.id for f in client.files.list()] == [made.id]
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(other.id)


# ---- chat


def test_image_by_data_url_and_by_file_id_are_the_same_chunk(connect):
    client = connect(f"chat-{next(names)}")
    url = data_url(png("blue"))
    file = client.files.create(file=("blue.png", png("blue")), purpose="vision")
    client.files.wait_for_processing(file.id, poll_interval=0.02)
    by_id, by_url = (
        ask(client, picture(where), extra_body={"mpic": {"policy": "reuse"}}) for where in (file.id, url)
    )
    assert by_id.choices[0].message.content == by_url.choices[0].message.content
    keys = [answer.usage.model_extra["mpic"]["chunks"][0]["key"] for answer in (by_id, by_url)]
    assert keys[0] == keys[1]
    assert by_id.usage.prompt_tokens_details.cached_tokens == 16
    assert by_url.usage.prompt_tokens_details.cached_tokens > 16  # the turn before is found, too


def test_a_stream_has_text_usage_and_logprobs_of_the_whole_answer(connect):
    options = {"seed": 1, "temperature": 1.0, "logprobs": True, "top_logprobs": 2}
    client = connect()
    whole = ask(client, "hello there", **options)
    with ask(client, "hello there", **options, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    shown = [t for c in chunks for o in c.choices if o.logprobs for t in o.logprobs.content]
    assert [t.token for t in shown] == [t.token for t in whole.choices[0].logprobs.content]
    assert all(len(t.top_logprobs) == 2 for t in shown)
    greedy = ask(client, "hi", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(greedy) == 6
    assert all(len(t.top_logprobs) == 2 and t.logprob == t.top_logprobs[0].logprob for t in greedy)


def test_stop_seed_and_n(connect):
    client = connect()
    options = {"max_tokens": 12, "temperature": 1.5, "extra_body": {"mpic": {"ignore_eos": True}}}
    one = ask(client, "tell", seed=5, **options)
    assert ask(client, "tell", seed=5, **options).choices[0].message.content == one.choices[0].message.content
    several = ask(client, "tell", seed=5, n=3, **options)
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert several.choices[0].message.content == one.choices[0].message.content
    assert len({c.message.content for c in several.choices}) > 1
    assert several.usage.completion_tokens == 36
    text = one.choices[0].message.content
    stopped = ask(client, "tell", seed=5, stop=text[4:6], **options).choices[0]
    assert text.startswith(stopped.message.content) and text[4:6] not in stopped.message.content
    assert stopped.finish_reason == "stop"


def test_a_conversation_finds_its_own_earlier_turns(connect):
    """Under every kind of policy the earlier turns are cached, more with every turn."""
    client = connect(f"turns-{next(names)}")
    file = client.files.create(file=("d.txt", b"a document that is linked"), purpose="user_data")
    client.files.wait_for_processing(file.id, poll_interval=0.02)
    for policy in ("prefix", "mpic-4", "reuse"):
        question = {"type": "text", "text": f"{policy}: what is it?"}
        messages = [{"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}, question]}]
        hits = []
        for turn in range(4):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=8, extra_body={"mpic": {"policy": policy}}
            )
            hits.append(answer.usage.model_extra["mpic"]["tokens"]["prefix_hit"])
            cached = answer.usage.prompt_tokens_details.cached_tokens
            if turn:  # all but the new question and the marks around it
                assert cached > 0.6 * answer.usage.prompt_tokens
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": f"and {turn}?"},
            ]
        assert hits[0] < hits[1] < hits[2] < hits[3], (policy, hits)


def test_models(connect):
    client = connect()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["context_length"] == 2048


# ---- its error classes


def test_not_found(connect):
    client = connect()
    for call, code in (
        (lambda: client.files.retrieve("file-none"), "file_not_found"),
        (lambda: client.models.retrieve("gpt"), "model_not_found"),
        (lambda: ask(client, [{"type": "image", "handle": "NOBODY"}]), "unknown_handle"),
        (lambda: ask(client, [{"type": "cache", "cache_id": "cache-none"}]), "cache_not_found"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == code


def test_bad_request(connect):
    client = connect()
    for options, code in (
        ({"content": ""}, "empty_prompt"),
        ({"content": "x" * 3000}, "context_length_exceeded"),
        ({"content": "x", "web_search_options": {}}, "unsupported_parameter"),
        ({"content": "x", "extra_body": {"mpic": {"policy": "best"}}}, "unknown_policy"),
        ({"content": picture("data:image/png;base64,AAAA")}, "invalid_image"),
        ({"content": picture("https://example.org/cat.png")}, "bad_request"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **options)
        assert caught.value.code == code


def test_authentication(connect, keyed):
    url, keys = keyed
    for secret in ("none", "mpic_00000000_" + "A" * 43):
        with (
            pytest.raises(openai.AuthenticationError) as caught,
            openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0) as stranger,
        ):
            stranger.models.list()
        assert caught.value.code == "unauthorized"
    client = connect()
    client.models.list()
    keys.revoke(client.prefix)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_permission_denied(connect):
    client = connect(f"quota-{next(names)}", files=1)
    client.files.create(file=b"one", purpose="user_data")
    with pytest.raises(openai.PermissionDeniedError) as caught:
        client.files.create(file=b"two", purpose="user_data")
    assert caught.value.code == "storage_quota_exceeded"


def test_rate_limits(connect):
    client = connect(requests_per_minute=2)
    client.models.list()
    client.models.list()
    with pytest.raises(openai.RateLimitError) as caught:
        client.models.list()
    assert caught.value.code == "rate_limited" and int(caught.value.response.headers["retry-after"]) >= 1


def test_a_full_queue_is_a_rate_limit_too(connect):
    """As many run as fit (1 to 4), and 4 wait. The rest is refused with Retry-After, and the admitted ones are
    answered."""
    clients = [connect() for _ in range(14)]
    results = []

    def go(client):
        try:
            answer = ask(client, "go", max_tokens=300, extra_body={"mpic": {"ignore_eos": True}})
            results.append(answer.usage.completion_tokens)
        except openai.RateLimitError as error:
            assert error.response.headers["retry-after"]
            results.append(error.code)

    in_threads(go, clients)
    refused = results.count("queue_full")
    assert 1 <= refused <= 9 and results.count(300) == 14 - refused
