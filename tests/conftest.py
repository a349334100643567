import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_and_reproducible():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def odd_defaults(request):
    """Torch's defaults, set as a user may set them."""
    device, dtype = request.param
    yield device, dtype
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
