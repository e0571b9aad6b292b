"""The benchmark of the server: its parts, and a small run of everything."""

import json

import pytest

from deepinfer.bench.serve import _frames_of, _most_overtaken, render, run_serve, write_json


def test_events_of_an_answer_in_chunks():
    assert _frames_of(b"HTTP/1.1 200 OK\r\n\r\n7\r\na\n\nbc\n\n\r\n4\r\nde\n\n\r\n0\r\n\r\n") == [b"a\n\n", b"bc\n\n", b"de\n\n"]


def test_requests_that_overtake():
    assert _most_overtaken([1.0, 1.0, 2.0, 3.0]) == 0
    assert _most_overtaken([3.0, 1.0, 2.0, 4.0]) == 2
    assert _most_overtaken([1.005, 1.0]) == 0  # one step


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    report = run_serve("random", device="cpu", num_streams=5, num_tokens=20, num_waiting=30, repeats=1)
    assert report.events.ratio > 0
    assert all(each > 0 for each in report.first_tokens[0].added_ms)
    assert report.queue.statuses == {"429 with retry-after": 100}
    assert report.queue.num_overtaken == 0
    text = render(report)
    assert "ratio" in text
    assert "5 streams" in text
    write_json(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["events"]["num_streams"] == 5
