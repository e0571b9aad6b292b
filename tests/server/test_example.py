"""The example of the clients runs, against replayed answers and against the model ``nano``."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import Program
from tests.server.scripted import call_of

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "clients.py")
WEATHER = '{"sky": {"cover": "clear"}, "wind": "calm"}'


def run(url):
    return subprocess.run([sys.executable, EXAMPLE, url], capture_output=True, text=True, check=False, timeout=300)


def check(done):
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for vendor in ("OpenAI", "Anthropic"):
        assert any(line.startswith(f"{vendor}, answer with a schema: Weather(sky=Sky(cover=") for line in lines)
    assert any(line.startswith('OpenAI, call: report_sky({"cover"') for line in lines)
    return done.stdout


def test_the_example_asks_in_both_protocols(server):
    call = call_of("report_sky", cover="clear") + "</｜DSML｜ calls>"
    server.engine.say_in_turn("I add.</think>68", WEATHER, call, "It is clear.", "I add.</think>68", WEATHER)
    told = check(run(server.url))
    assert "OpenAI, reasoning and answer: I add.68\n" in told
    assert "OpenAI, answer after the call: It is clear.\n" in told
    assert "Anthropic, answer: 68\n" in told


@pytest.mark.slow  # the clients try again for two seconds
def test_the_example_names_a_server_that_is_not_there():
    done = run("http://127.0.0.1:9")
    assert done.returncode == 2
    assert "does not answer" in done.stderr


@pytest.mark.slow
def test_the_example_asks_nano():
    with Program("--model", "nano") as made:
        told = check(run(made.url))
    assert "23 + 45 = 68" in told
