"""Two servers: one in this process over a fake engine, for each test; and ``mpic serve`` as a process of its own on a
tiny random model, for all of them."""

import pytest
from server_helpers import POOL_PAGES, chat_template, fake_server, save_tiny_llava

from mpic.evals.demo import running_server


@pytest.fixture(scope="session")
def template():
    return chat_template()


@pytest.fixture
async def server(tmp_path, template):
    async with fake_server(tmp_path, template) as server:
        yield server


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    model = save_tiny_llava(tmp_path_factory.mktemp("model") / "tiny")
    data = tmp_path_factory.mktemp("data")
    with running_server(data, str(model), "--pool-bytes", str(POOL_PAGES * 12_288)) as (url, _):
        yield url
