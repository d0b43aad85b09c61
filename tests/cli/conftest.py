import signal

import pytest


@pytest.fixture
def sigint():
    """The signal is handled as in a program that has just started, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
