import pytest

from mpic.imaging.decoder import Decoder


@pytest.fixture(scope="module")
def decoder():
    made = Decoder(workers=1)
    yield made
    made.workers.close()
