"""The reference pages say what the code does: routes, commands, keys, errors, and the supported part of OpenAI's
API."""

import dataclasses
import typing

import httpx
import pytest
from openai.types.chat import completion_create_params
from openai_table import NEEDS, PROBES, USED, verdict
from rest import openapi

import mpic.errors
from mpic.api.openai_fields import BY_NAME
from mpic.api.requests import ChatRequest
from mpic.cli import COMMANDS
from mpic.config import SECTIONS, ConfigError
from mpic.keys import KeyNotFound
from mpic.link import POLICIES


@pytest.fixture(scope="module")
def page(site):
    return lambda name: site.generated[f"docs/reference/{name}.md"]


def test_the_rest_page_is_made_from_what_a_server_says_of_itself(url, page):
    said, ours = httpx.get(f"{url}/openapi.json", timeout=60).json(), openapi()
    assert said["paths"].keys() == ours["paths"].keys() and len(ours["paths"]) > 15
    objects = said["components"]["schemas"]
    assert {name: objects[name] for name in ours["components"]["schemas"]} == ours["components"]["schemas"]
    for path, methods in said["paths"].items():
        for method in methods:
            assert f"### {method.upper()} {path}\n" in page("rest")


def test_the_sdk_page_has_every_public_method_with_its_arguments(page):
    some = ("files.create", "caches.update", "references.search", "models.list", "chat.completions.create")
    for method in some:
        assert f"\n### client.{method}\n" in page("sdk")
    assert "- `expires_in`:" in page("sdk") or "- `ttl`:" in page("sdk")
    assert "ForwardRef" not in page("sdk") and "<class" not in page("sdk") and "<object" not in page("sdk")


def test_commands_keys_codes_and_policies_are_all_listed(page, site):
    assert all(f"\n## mpic {name}\n" in page("cli") for name in COMMANDS)
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert f"\n| `{field.name}` |" in page("configuration")
    classes = [one for one in vars(mpic.errors).values() if isinstance(one, type)]
    codes = {one.code for one in (*classes, ConfigError, KeyNotFound) if issubclass(one, mpic.MPICError)}
    assert len(codes) > 50 and all(f"`{code}`" in page("errors") for code in codes)
    policies = site.pages["docs/policies.md"].html
    assert all(f"<code>{policy.syntax}</code>" in policies for policy in POLICIES)


def test_the_table_of_openai_has_every_parameter_of_theirs_and_of_ours():
    theirs = set(typing.get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming)) | {
        "stream"
    }
    assert set(PROBES) >= theirs | (set(ChatRequest.model_fields) - {"mpic"})
    assert {name for name in PROBES if verdict(name) == "supported"} == USED
    assert set(PROBES) - USED <= set(BY_NAME), "the table has all others"


@pytest.mark.parametrize("name", [name for name in PROBES if verdict(name) != "supported"])
def test_a_server_does_with_a_parameter_what_the_table_says(url, name):
    body = {"messages": PROBES["messages"][0], "max_tokens": 1, **NEEDS.get(name, {}), name: PROBES[name][0]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    if verdict(name) == "ignored":
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_parameter"
        assert name in answer.json()["error"]["message"]
