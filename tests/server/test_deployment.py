"""The files for operators name only what exists: metrics of the board, options of the unit and of the image."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from deepinfer.cli import main
from deepinfer.config import ServerArgs
from deepinfer.metrics import QUANTITIES, Metrics, registry
from deepinfer.server.banner import banner
from tests.server.scripted import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def board_texts(value):
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("expr", "query") and isinstance(each, str):
                yield each
            yield from board_texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from board_texts(each)


def test_the_board_asks_for_metrics_that_the_server_has():
    families = registry(lambda: {"0": Metrics().snapshot()}).collect()
    known = {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
    board = json.loads((DOCKER / "grafana.json").read_text())
    texts = [each for each in board_texts(board) if "deepinfer_" in each]
    named = {name for text in texts for name in re.findall(r"deepinfer_\w+", text)}
    assert len(named) > 15
    assert sorted(named - known) == []
    labels = {label for text in texts for label in re.findall(r"by \((\w+)\)", text)}
    assert labels <= {"le"} | {quantity.label for quantity in QUANTITIES.values()}
    assert all(text.count("(") == text.count(")") for text in texts)


def test_panels_do_not_overlap():
    board = json.loads((DOCKER / "grafana.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)


@pytest.mark.parametrize("name", ["Dockerfile", "deepinfer.service", "prometheus.yml"])
def test_files_name_options_that_exist(name):
    serve = main.get_command(click.Context(main), "serve")
    known = {option for param in serve.params for option in (*param.opts, *param.secondary_opts)}
    text = (DOCKER / name).read_text()
    commands = [line for line in text.splitlines() if "deepinfer" in line and "serve" in line and not line.startswith("#")]
    used = {option for line in commands for option in re.findall(r"--[a-z-]+", line)}
    assert used <= known
    assert used or name == "prometheus.yml"


def test_the_first_command_of_the_readme_ends_in_an_address_that_answers():
    """The recipe is the program whose banner another test reads, and the lines in the README are that banner's."""
    readme = (ROOT / "README.md").read_text()
    assert readme.partition("```sh\n")[2].startswith("make serve ")
    recipe = re.search(r"^serve:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe[1] == "@$(BIN)/deepinfer serve"
    shown = readme.partition("```text\n")[2].partition("\n```")[0].splitlines()
    told = banner(ServerArgs(served_model_names=("nano",)), ScriptedEngine().facts, 8000, "nano, 12 layers").splitlines()
    differing = [line.split()[0] for line, expected in zip(shown, told, strict=True) if line != expected]
    assert differing == ["model", "memory"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_banner_names_an_address_that_this_machine_reaches_and_no_key(host, url):
    args = ServerArgs(host=host, served_model_names=("it's",), api_keys=("secret",))
    told = banner(args, ScriptedEngine().facts, 80, "nano")
    assert "3.0 MiB of weights and 5.0 GiB of cache for 1,048,576 tokens on cpu" in told
    assert told.count(url) == 5
    assert "secret" not in told
    words = shlex.split(told.rpartition("  try ")[2])
    assert json.loads(words[-1])["model"] == "it's"
    assert "authorization: Bearer $API_KEY" in words
