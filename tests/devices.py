"""The devices that a numeric test runs on."""

import contextlib
import warnings

import pytest
import torch


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device in turn; a test with this fixture runs on all devices."""
    return torch.device(request.param)


@contextlib.contextmanager
def no_waits(device):
    """Within this context, every wait for the device is an error."""
    if device.type == "cpu":
        yield
        return
    with warnings.catch_warnings():  # torch warns once that this mode is experimental
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
