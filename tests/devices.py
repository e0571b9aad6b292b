"""The devices that a numeric test runs on."""

import pytest
import torch


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device in turn; a test that takes it says the same thing about all of them."""
    return torch.device(request.param)
