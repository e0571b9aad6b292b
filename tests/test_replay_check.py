"""``deepinfer check replay``: its findings, and that it finds an error that is there."""

import pytest
import torch
from click.testing import CliRunner

from deepinfer.bench import replay
from deepinfer.cli import main
from deepinfer.config import named_config

CPU = torch.device("cpu")


def test_tables_follow_the_rule():
    (finding,) = replay.check_tables(named_config("random"), 140, CPU)
    assert not finding.is_failure
    assert finding.cases > 100


def test_a_wrong_window_is_found(monkeypatch):
    right = replay._expected
    monkeypatch.setattr(replay, "_expected", lambda start, end, floor, window, mode: right(start, end, floor, window - 1, mode))
    (finding,) = replay.check_tables(named_config("random"), 140, CPU)
    assert finding.is_failure


@pytest.mark.slow
def test_the_command_prints_all_levels_and_succeeds():
    result = CliRunner().invoke(main, ["check", "replay", "--device", "cpu", "--max-tokens", "512"])
    assert result.exit_code == 0, result.output
    for words in ("rows, window keys, ring addresses", "bit-equal", "state hit against exact", "replay hit, 128 tokens"):
        assert words in result.output
