"""The kernels are compiled once; where they cannot be, the engine runs the reference and says so in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRY = """
import logging, sys
logging.basicConfig(format="%(message)s", level=logging.WARNING)
from deepinfer.ops import cpu
print(cpu.is_available())
"""


def tried(cache, **environment):
    """Standard output and error of a process that asks for the kernels."""
    variables = os.environ | {"DEEPINFER_CACHE_DIR": str(cache)} | environment
    done = subprocess.run([sys.executable, "-c", TRY], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip().splitlines()


def test_the_second_start_compiles_nothing(tmp_path):
    assert tried(tmp_path) == ("True", [])
    (library,) = (tmp_path / "kernels").iterdir()
    before = library.stat().st_mtime_ns
    assert tried(tmp_path, PATH=os.environ["PATH"]) == ("True", [])
    assert library.stat().st_mtime_ns == before
    assert list((tmp_path / "kernels").iterdir()) == [library]


def test_two_first_starts_at_once(tmp_path):
    variables = os.environ | {"DEEPINFER_CACHE_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", TRY], env=variables, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.communicate()[0].strip() for each in both] == ["True", "True"]
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_without_a_compiler_one_line_says_that_steps_are_slower(tmp_path):
    found, lines = tried(tmp_path, PATH="", CC="")
    assert found == "False"
    assert len(lines) == 1
    assert "no C compiler" in lines[0]


def test_a_compiler_that_fails_is_named(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'kernels.c:1: no such instruction' >&2\nexit 1\n")
    compiler.chmod(0o755)
    found, lines = tried(tmp_path / "cache", CC=str(compiler))
    assert found == "False"
    assert len(lines) == 1
    assert "no such instruction" in lines[0]
    assert not any((tmp_path / "cache" / "kernels").iterdir())


@pytest.mark.parametrize("blocked", ["a file in its place", "read-only"])
def test_a_cache_that_cannot_be_written_costs_a_compilation_at_every_start(tmp_path, blocked):
    cache = tmp_path / "cache"
    if blocked == "read-only":
        if os.geteuid() == 0:
            pytest.skip("root writes into read-only folders")
        cache.mkdir(mode=0o500)
    else:
        cache.write_text("")
    found, lines = tried(cache)
    assert found == "True"
    assert len(lines) == 1
    assert "at every start" in lines[0]


@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx", "-mno-avx512f -mno-fma"])
def test_older_processors_compute_within_the_tolerances(flags, tmp_path):
    """The parity of a few operators with kernels that are compiled for fewer instructions."""
    script = tmp_path / "parity.py"
    script.write_text(
        "import torch\n"
        "from deepinfer.ops.cpu import library\n"
        f"library._FLAGS = (*library._FLAGS, *{flags.split()!r})\n"
        "from deepinfer.config import named_config\n"
        "from deepinfer.ops.cases import CASES\n"
        "from tests.ops.invariance import parity_faults, row_faults\n"
        "config, here = named_config('golden'), torch.device('cpu')\n"
        "families = ('quant', 'norm', 'moe', 'engram', 'attention')\n"
        "for case in CASES:\n"
        "    if case.op.name.startswith(families) and 1 < case.num_rows < 40:\n"
        "        assert parity_faults(case, 'cpu', here, torch.bfloat16, config) == [], case\n"
        "        if case.take:\n"
        "            assert row_faults(case, 'cpu', here, torch.bfloat16, config, 0) == [], case\n"
        "print('right')\n"
    )
    root = Path(__file__).parents[3]
    variables = os.environ | {"DEEPINFER_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True, check=False, cwd=root)
    assert done.stdout == "right\n", done.stderr
