"""Plays scenes: functions, each in a forked process of its own that ends as every program ends."""

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
    """Print exit code, output and seconds of each scene; in the forks it returns without a word, so that they end."""
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
"""Python 3.12 warns of forks beside threads, which are what the scenes are about."""


def played(module, names, *flags):
    """Name -> [exit code, lines of output, seconds]: the scenes of a module of tests, all warnings on."""
    done = subprocess.run(
        [sys.executable, "-P", *flags, "-W", "default", "-W", _OF_FORKS, "-m", module, *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert not done.stderr
    results = (json.loads(line) for line in done.stdout.splitlines())
    return {name: [code, output.splitlines(), seconds] for name, code, output, seconds in results}
