"""A server in this process, one for each test."""

import pytest
from server_helpers import chat_template, running


@pytest.fixture(scope="session")
def template():
    return chat_template()


@pytest.fixture
async def server(tmp_path, template):
    async with running(tmp_path, template) as server:
        yield server
