"""Options, skips and fixtures that all tests share."""

import importlib.util
import os
import sys
import zlib

import hypothesis
import pytest

# Set before torch is imported, because waiting threads spin by default: two test processes on two cores then slow down tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other test processes use the other cores

# Examples are drawn from the test's name, so that a run can be repeated.  There is no deadline, because machines differ in speed.
hypothesis.settings.register_profile("deepinfer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deepinfer")


SERVER_IS_THERE = importlib.util.find_spec("uvicorn") is not None
collect_ignore = [] if SERVER_IS_THERE else ["server"]


def pytest_report_header():
    return None if SERVER_IS_THERE else "tests/server: left out, because the extra `server` is not installed"


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
    import torch  # here, so that tests without tensors start fast

    return torch.cuda.device_count()


@pytest.fixture(scope="module", autouse=True)
def starting_backend():
    """Every module starts with the backend that an engine binds on this machine; tests of operators begin with the reference."""
    if "torch" not in sys.modules:  # a test without tensors
        yield
        return
    from deepinfer.ops import cpu, op

    op.bind(cpu.NAME if not _num_devices() and cpu.is_available() else op.REFERENCE)
    yield


@pytest.fixture
def seed(request):
    """A number that depends only on the test's name."""
    return zlib.crc32(request.node.nodeid.encode())
