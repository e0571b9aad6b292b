"""Ten thousand random requests from the OpenAPI document, by schemathesis, against the program that users start."""

import contextlib
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.server.conftest import Program

MOST_GROWTH_MB = 64
"""Bound of the memory that the server and the core process gain during the run."""
GROUPS = [["--include-path-regex", each] for each in ("chat/", "responses", "messages")] + [
    ["--exclude-path-regex", "chat/|responses|messages"]
]
"""Parts of the document that run at once.  The threads of schemathesis fail inside Python 3.11, so each has one thread."""
CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance",
]  # fmt: skip
OPTIONS = [
    "--phases", "coverage,fuzzing", "--max-examples", "100", "--workers", "1", "--seed", "1", "--continue-on-failure",
    "--no-shrink", "--request-timeout", "60", "--suppress-health-check", "all", "--checks", ",".join(CHECKS),
]  # fmt: skip


def memory_mb(pid):
    """Resident memory of a process and its children."""
    total = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return total + sum(memory_mb(int(each)) for each in children)


@pytest.mark.slow
def test_random_requests_find_no_failure_no_hang_and_no_leak(capsys, tmp_path):
    command = shutil.which("schemathesis")
    if command is None:
        pytest.skip("the command schemathesis is not installed")
    with Program("--max-model-len", "1024", "--max-num-seqs", "16") as server:
        bombard(server, command, capsys, tmp_path)


def bombard(server, command, capsys, tmp_path):
    """Send the requests of all groups at once; check answers, memory and the log."""
    hooks = os.environ | {"SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("schemathesis_hooks.py"))}
    seen, log, has_ended = [memory_mb(server.process.pid)], [], threading.Event()

    def watch():
        """Measure, and empty the pipe of the log, so that the server never waits for it."""
        while not has_ended.wait(1):
            seen.append(memory_mb(server.process.pid))
            with contextlib.suppress(BlockingIOError):
                while part := os.read(server.process.stderr.fileno(), 1 << 16):
                    log.append(part.decode())

    def run(group, texts):
        arguments = [command, "run", f"{server.url}/openapi.json", *OPTIONS, *group]
        done = subprocess.run(arguments, env=hooks, cwd=tmp_path, capture_output=True, text=True, check=False)
        texts.append((done.returncode, done.stdout))

    watching, texts = threading.Thread(target=watch), []
    running = [threading.Thread(target=run, args=(group, texts)) for group in GROUPS]
    for each in (watching, *running):
        each.start()
    for each in running:
        each.join()
    has_ended.set()
    watching.join()
    code, rest = server.end()
    log = "".join(log) + rest
    assert code == 0, log
    for returned, text in texts:
        assert returned == 0, text
    num_requests = sum(int(re.search(r"(\d+) generated", text)[1]) for _, text in texts)
    statuses = re.findall(r" (\d{3}) \d+ ms", log)
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    with capsys.disabled():
        print(f"\n{num_requests} requests, {counts}; memory: {seen[0]:.0f} MB before, {seen[-1]:.0f} MB after")  # noqa: T201
        print(f"most {max(seen):.0f} MB, {len(seen)} s")  # noqa: T201
    assert num_requests >= 10_000
    assert max(seen) - seen[0] < MOST_GROWTH_MB
    assert not [status for status in counts if status.startswith("5")]
