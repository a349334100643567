import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_and_reproducible():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
