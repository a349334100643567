import gc
import os
import signal

import pytest
import torch

from helpers.ranks import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: the cores are busy
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # that of trio, which selenium installs, takes long to import
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # runs the kernels on a CPU; before triton is imported
os.environ["TERM"] = "xterm"  # rich draws no bars on a dumb terminal
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may use the network


@pytest.fixture(autouse=True)
def _quiet_and_reproducible():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Hide modules and other objects that stay from the garbage collector: to visit them takes 0.2 s each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # otherwise Triton prints its objects as leaks


@pytest.fixture
def odd_defaults(request):
    """Set torch's defaults as a user may set them."""
    device, dtype = request.param
    yield device, dtype
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def start_ranks():
    """Return a function that connects a number of processes; each number is started once."""
    started: dict[int, Ranks] = {}

    def start(size: int) -> Ranks:
        return started.get(size) or started.setdefault(size, Ranks(size))

    yield start
    for processes in started.values():
        processes.close()


@pytest.fixture(scope="session", params=[2, 3], ids=["2ranks", "3ranks"])
def ranks(request, start_ranks):
    """Processes that take steps together."""
    return start_ranks(request.param)


@pytest.fixture(scope="session")
def four_ranks(start_ranks):
    """Four processes, for meshes of two dimensions."""
    return start_ranks(4)


@pytest.fixture
def default_signals():
    """Python's own handlers, which are not there where the tests run in the background."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == own
