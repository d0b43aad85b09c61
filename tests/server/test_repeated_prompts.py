"""A long prompt that the same user sends again is not tokenized again, whichever way it is asked."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from mpic.prompt import slice_cache

TIMES = 12


@pytest.mark.parametrize("retrieval", ["off", "always"])
async def test_a_users_long_prompt_is_tokenized_once(server, monkeypatch, retrieval):
    monkeypatch.setattr(slice_cache, "LEAST", 100)
    sliced = server.app.state.mpic.template.documents
    tokenize = Mock(wraps=sliced._fast)
    monkeypatch.setattr(sliced, "_fast", tokenize)
    question = f"{retrieval} " + "long and longer " * TIMES

    async def asked(headers):
        tokenize.reset_mock()
        body = {
            "messages": [{"role": "user", "content": question}],
            "mpic": {"retrieval": {"mode": retrieval}},
        }
        answer = await server.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return sum(call.args[0].count("longer") for call in tokenize.call_args_list)

    alice, bob = server.key("alice"), server.key("bob")
    assert await asked(alice) == TIMES
    assert await asked(alice) == 0
    assert await asked(bob) == TIMES
