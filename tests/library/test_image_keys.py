"""Identities of files that were decoded before."""

from unittest.mock import Mock

import pytest

from mpic.errors import InvalidImage
from mpic.kv.chunk import ChunkKey
from mpic.library.intake.remembered import ImageKeys


def test_the_least_recently_used_file_is_forgotten_and_decoded_again():
    keys, decoded = ImageKeys(2), []

    def ask(data):
        return keys.key("ann", data, lambda: decoded.append(data) or ChunkKey("image", data.decode()))

    for data in (b"a", b"b", b"a", b"c", b"a", b"b"):
        assert ask(data).digest == data.decode()
    assert decoded == [b"a", b"b", b"c", b"b"]


def test_a_file_that_is_refused_is_refused_again():
    keys = ImageKeys()
    for _ in range(2):
        with pytest.raises(InvalidImage):
            keys.key("ann", b"x", Mock(side_effect=InvalidImage("no image")))
