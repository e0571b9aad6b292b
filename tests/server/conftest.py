"""Servers that the tests share: one with a scripted engine, one with the model ``nano``."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.server.scripted import Server

SERVE = [sys.executable, "-m", "deepinfer.cli", "serve", "--model", "random", "--device", "cpu", "--port", "0"]
SIZES = ["--max-model-len", "16384", "--max-num-seqs", "8", "--num-drafts", "2"]


class Program:
    """``deepinfer serve`` as a process, which ends with its ``with`` statement at the latest."""

    def __init__(self, *options, **variables):
        env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        self.process = subprocess.Popen(
            [*SERVE, *SIZES, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        try:
            self.banner = ""
            while "  try " not in self.banner:
                line = self.process.stdout.readline()
                assert line, self.process.stderr.read()
                self.banner += line
            self.url = re.search(r"page +(http://\S+)/", self.banner)[1]
        except BaseException:
            self.__exit__()
            raise
        os.set_blocking(self.process.stderr.fileno(), False)  # the log is read at the end only

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.process.kill()
        self.process.wait(30)
        self.process.stdout.close()
        self.process.stderr.close()

    def end(self, number=signal.SIGTERM):
        """Send a signal, and return the exit code and the log."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        self.process.wait(30)
        return self.process.returncode, self.process.stderr.read()


@pytest.fixture(scope="session")
def program():
    """``nano`` behind the program that users start."""
    with Program() as made:
        yield made
        code, log = made.end()
        assert code == 0, log


@pytest.fixture(scope="session")
def shared_server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def server(shared_server):
    """A scripted server; a test that leaves a request open fails."""
    shared_server.engine.reset()
    yield shared_server
    deadline = time.monotonic() + 5
    while shared_server.engine.open or shared_server.service.gate.num_open:
        assert time.monotonic() < deadline, "a request is still open"
        time.sleep(0.01)
    assert sum(shared_server.service.gate.num_waiting.values()) == 0
