"""The synchronous client equals the output of its generator for the asynchronous one."""

import importlib.util
from pathlib import Path

import pytest

import mpic.client

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("generator", ROOT / "tools" / "generate_sync_client.py")
generator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generator)


@pytest.mark.parametrize("name, text", generator.generated().items())
def test_the_synchronous_client_is_up_to_date(name, text):
    path = ROOT / "mpic" / "client" / "_sync" / name
    assert path.read_text() == text, "run tools/generate_sync_client.py"


def test_names_come_from_where_users_import_them():
    assert mpic.MPIC.__module__ == mpic.client.AsyncStream.__module__ == "mpic.client"
