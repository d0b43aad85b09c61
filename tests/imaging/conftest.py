import pytest

from mpic.imaging import worker_pool
from mpic.imaging.decoder import Decoder


@pytest.fixture(scope="module", autouse=True)
def idle_processes_wait_for_a_slow_machine():
    """Tests count the processes of a module, and on a busy machine half a minute passes between two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "IDLE_SECONDS", 3600.0)
        yield


@pytest.fixture(scope="module")
def decoder():
    made = Decoder(workers=1)
    yield made
    made.workers.close()
