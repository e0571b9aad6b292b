"""Properties of the whole package: its import starts nothing, and all its modules have docstrings."""

import ast
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deepinfer

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted((ROOT / "deepinfer").rglob("*.py"))
PLANNING = next(
    contract["source_modules"] for contract in PROJECT["tool"]["importlinter"]["contracts"] if contract["type"] == "forbidden"
)

WATCH = """
import json, os, pkgutil, sys, threading
import click, numpy, safetensors.torch, tabulate, tokenizers, torch, tqdm  # their own threads and files do not count
try:
    import triton
except ModuleNotFoundError:
    triton = None  # an extra, as OpenTelemetry: without it, modules that need it cannot be imported

told = []

def watch(name):
    def setter(*args, **kwargs):
        told.append(f"torch.{name}")
    return setter

for name in dir(torch):
    if name.startswith("set_"):
        setattr(torch, name, watch(name))

class Environment(dict):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in ("os", "_collections_abc", "__main__"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("deepinfer"):
            told.append(f"environment variable {key}")
        return super().__getitem__(key)

    def __contains__(self, key):
        return self.get(key) is not None

    def get(self, key, default=None):
        try:
            return self[key]
        except KeyError:
            return default

os.environ = Environment(os.environ)
threads = threading.active_count()
import deepinfer
for module in pkgutil.walk_packages(deepinfer.__path__, "deepinfer."):
    try:
        __import__(module.name)
    except ModuleNotFoundError as error:
        if not error.name.startswith("opentelemetry.") and (triton or error.name != "triton"):
            raise
told += [f"thread {each.name}" for each in threading.enumerate()[threads:]]
if torch.cuda.is_initialized():
    told.append("CUDA")
print(json.dumps(told))
"""


def run_python(source):
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_version_is_the_projects():
    assert importlib.metadata.version("deepinfer") == PROJECT["project"]["version"]
    assert getattr(deepinfer, "__version__", PROJECT["project"]["version"]) == PROJECT["project"]["version"]


def test_importing_every_module_starts_nothing():
    assert json.loads(run_python(WATCH)) == []


@pytest.mark.parametrize("module", [*PLANNING, "deepinfer.tokenizer"])
def test_planning_half_runs_where_torch_is_not_installed(module):
    run_python(f"import sys; sys.modules['torch'] = None; import {module}")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_says_what_it_owns(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_every_dependency_has_its_reason():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    wanted = [
        *PROJECT["project"]["dependencies"],
        *itertools.chain.from_iterable(PROJECT["project"]["optional-dependencies"].values()),
    ]
    for requirement in wanted:
        found = [line for line in lines if f'"{requirement}"' in line]
        assert found, requirement
        assert all("#" in line for line in found), requirement
