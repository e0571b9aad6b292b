"""Options, skips and fixtures that all tests share."""

import os
import zlib

import hypothesis
import pytest

# Before torch is imported: threads that wait spin by default, and two test processes on two cores then slow each other tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are taken by the other processes

# Drawn from the test's name, so that a run can be repeated; no deadline, because machines differ in speed.
hypothesis.settings.register_profile("deepinfer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deepinfer")


def pytest_addoption(parser):
    parser.addoption(
        "--slow",
        action="store_true",
        default=os.environ.get("DEEPINFER_TEST_SLOW", "") not in ("", "0"),
        help="run the tests marked slow too",
    )


def pytest_collection_modifyitems(config, items):
    slow_skip = pytest.mark.skip(reason="slow; run with --slow or DEEPINFER_TEST_SLOW=1")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(slow_skip)
        wanted = 2 if "multi_gpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if wanted and _num_devices() < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), {_num_devices()} found"))


def _num_devices():
    import torch  # here, so that tests without tensors start at once

    return torch.cuda.device_count()


@pytest.fixture
def seed(request):
    """A number that depends on the test's name only."""
    return zlib.crc32(request.node.nodeid.encode())
