"""A server in this process over a fake engine, for each test. (The real one is in the conftest above.)"""

import pytest
from server_helpers import chat_template, fake_server


@pytest.fixture(scope="session")
def template():
    return chat_template()


@pytest.fixture
async def server(tmp_path, template):
    async with fake_server(tmp_path, template) as server:
        yield server
