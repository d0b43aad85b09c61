"""A long prompt that the same user sends again is not tokenized again, whichever way it is asked."""

from __future__ import annotations

import pytest

from mpic.prompt import slice_cache

TIMES = 12


@pytest.mark.parametrize("retrieval", ["off", "always"])
async def test_a_users_long_prompt_is_tokenized_once(server, monkeypatch, retrieval):
    monkeypatch.setattr(slice_cache, "LEAST", 100)
    sliced = server.app.state.mpic.template.documents
    tokenized = []
    plain = sliced._fast

    def counted(text):
        tokenized.append(text)
        return plain(text)

    monkeypatch.setattr(sliced, "_fast", counted)
    question = f"{retrieval} " + "long and longer " * TIMES

    async def asked(headers):
        tokenized.clear()
        body = {
            "messages": [{"role": "user", "content": question}],
            "mpic": {"retrieval": {"mode": retrieval}},
        }
        answer = await server.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return sum(text.count("longer") for text in tokenized)

    alice, bob = server.key("alice"), server.key("bob")
    assert await asked(alice) == TIMES
    assert await asked(alice) == 0
    assert await asked(bob) == TIMES
