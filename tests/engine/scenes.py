"""Plays scenes.  A scene is a function; it runs in a separate forked process that ends like an ordinary program."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def play(scenes, names):
    """Print exit code, output and seconds of each scene; in a fork it returns without output, so that the fork ends."""
    for name in names:
        with tempfile.TemporaryFile() as output:
            begin = time.monotonic()
            if not (pid := os.fork()):
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                signal.alarm(60)  # a scene that hangs is ended
                scenes[name]()
                return
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            seconds = time.monotonic() - begin
            output.seek(0)
            sys.stdout.write(json.dumps([name, code, output.read().decode(), seconds]) + "\n")
            sys.stdout.flush()


_OF_FORKS = "ignore:This process (pid=:DeprecationWarning"
"""Python 3.12 warns of forks in programs with threads; the scenes fork on purpose."""


def played(module, names, *flags):
    """Play the scenes of a test module with all warnings on; returns name -> [exit code, lines of output, seconds]."""
    done = subprocess.run(
        [sys.executable, "-P", *flags, "-W", "default", "-W", _OF_FORKS, "-m", module, *names],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",  # a forked child must not print what its parent has not written yet
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert not done.stderr
    results = (json.loads(line) for line in done.stdout.splitlines())
    return {name: [code, output.splitlines(), seconds] for name, code, output, seconds in results}
