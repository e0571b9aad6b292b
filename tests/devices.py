"""The devices that a numeric test runs on."""

import contextlib
import warnings

import pytest
import torch


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device in turn; a test that takes it says the same thing about all of them."""
    return torch.device(request.param)


@contextlib.contextmanager
def no_waits(device):
    """Any wait for the device is an error."""
    if device.type == "cpu":
        yield
        return
    with warnings.catch_warnings():  # torch says once that this mode is young
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
