"""Progress bars: shown on a terminal, not in a log."""

import io
import sys
from pathlib import Path

import pytest

import deepinfer
from deepinfer.model.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(monkeypatch, stream, **given):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(2, unit="step", desc="work", **given) as bar:
        bar.update()
        bar.update()
    return stream and not stream.closed and stream.getvalue()


def test_a_terminal_shows_a_bar_that_can_be_turned_off(monkeypatch):
    assert "work: 100%" in drawn(monkeypatch, Terminal())
    assert drawn(monkeypatch, Terminal(), shown=False) == ""


def closed():
    stream = Terminal()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [io.StringIO, closed, lambda: None], ids=["log", "closed", "none"])
def test_nothing_is_drawn_without_a_terminal(monkeypatch, stream):
    assert not drawn(monkeypatch, stream())


def test_all_bars_of_the_package_are_made_in_one_place():
    files = Path(deepinfer.__file__).parent.rglob("*.py")
    assert [path.name for path in files if "tqdm(" in path.read_text()] == ["progress.py"]
