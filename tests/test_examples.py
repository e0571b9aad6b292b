"""The examples run with the commands in their docstrings."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.config import environment

OFFLINE = str(Path(__file__).resolve().parent.parent / "examples" / "offline_inference.py")


def test_offline_inference_continues_its_prompts_with_the_small_model():
    env = {key: value for key, value in os.environ.items() if key != "DEEPINFER_HF_MODEL_DIR"}
    done = subprocess.run([sys.executable, OFFLINE, "--max-tokens", "2"], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("'The engine plans")
    assert all(line.startswith("    ") for line in lines[1::2])


@pytest.mark.parametrize("arguments", [["--ep", "8"], ["--ep", "2", "--dp", "8"], ["--ep", "2", "--cp", "8"], ["--cp", "2"]])
def test_offline_inference_refuses_ranks_that_are_not_supported_in_one_sentence(arguments, capsys):
    assert runpy.run_path(OFFLINE)["main"](arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("Error: ")
    assert "is not supported: in this version one rank" in told
    assert told.count("\n") == 1


def test_offline_inference_takes_the_model_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "/no/such/place")
    environment.cache_clear()
    try:
        assert runpy.run_path(OFFLINE)["main"]([]) == 2
    finally:
        environment.cache_clear()
    assert "model '/no/such/place' is neither a directory nor a known name" in capsys.readouterr().err
