"""A server in this process over a fake engine, for each test. (The real one is in the conftest above.)"""

import pytest
from server_helpers import POOL_PAGES, chat_template, fake_server

from mpic.keys import KeyStore
from mpic_lab.demo import running_server


@pytest.fixture(scope="session")
def template():
    return chat_template()


@pytest.fixture
async def server(tmp_path, template):
    async with fake_server(tmp_path, template) as server:
        yield server


@pytest.fixture(scope="session")
def keyed(tmp_path_factory, tiny_model):
    """(url, keys) of a server that has API keys; keys made later work at once."""
    data = tmp_path_factory.mktemp("keyed")
    keys = KeyStore(data)
    keys.create("root", "admin")
    flags = ("--pool-bytes", str(POOL_PAGES * 12_288), "--max-running", "4", "--max-waiting", "4")
    with running_server(data, tiny_model, *flags) as (url, _):
        yield url, keys
    keys.close()
