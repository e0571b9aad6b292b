"""Step times: sizes are measured in turn; a stored curve is used for the same engine and a limited time, and never if damaged."""

import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from deepinfer.engine.step_times import curve_path, load_curve, measure_curve, save_curve, step_sizes
from deepinfer.scheduler.budget import CostCurve

KEY = {"model": "random", "device": "cpu", "num_drafts": 5, "page_tokens": 128}
CURVE = CostCurve([1, 8, 64], [1.5, 2.25, 9.125], max_padded_rows=8)


def points(curve):
    return curve.sizes.tolist(), curve.profile_ms.tolist(), curve.max_padded_rows


def test_profile_takes_the_median_of_alternating_runs():
    asked = []

    def measure(rows):
        asked.append(rows)
        return 1000.0 if len(asked) <= 2 or len(asked) == 5 else float(rows)

    curve = measure_curve(measure, [4, 8], num_runs=3)
    assert asked == [4, 8] * 4
    assert curve.profile_ms.tolist() == [4.0, 8.0]


def test_sizes_end_with_the_largest_step_and_are_few():
    assert step_sizes(6) == [6]
    assert step_sizes(8) == [8]
    assert step_sizes(20) == [8, 16, 20]
    assert step_sizes(128) == [8, 16, 32, 64, 96, 128]
    for rows in range(1, 3000, 7):
        sizes = step_sizes(rows)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == rows
        assert len(sizes) <= 20


def test_a_stored_curve_comes_back(tmp_path):
    directory = tmp_path / "made" / "on the way"
    assert load_curve(directory, 3600, KEY) is None
    save_curve(directory, KEY, CURVE)
    assert points(load_curve(directory, 3600, dict(reversed(KEY.items())))) == points(CURVE)
    assert [each.name for each in directory.iterdir()] == [curve_path(directory, KEY).name]


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_curve(None, KEY, CURVE)
    assert load_curve(None, 3600, KEY) is None
    assert not list(tmp_path.iterdir())


def test_another_engine_has_another_file(tmp_path):
    save_curve(tmp_path, KEY, CURVE)
    assert load_curve(tmp_path, 3600, {**KEY, "num_drafts": 4}) is None


def test_what_was_learned_is_not_stored(tmp_path):
    curve = CostCurve([8], [1.0])
    for _ in range(11):
        curve.refine(8, 9.0)
    save_curve(tmp_path, KEY, curve)
    assert load_curve(tmp_path, 3600, KEY).ms.tolist() == [1.0]


@pytest.mark.parametrize(("age_s", "ttl_s", "counts"), [(59, 60, True), (61, 60, False), (0.5, 0, False), (-60, 60, False)])
def test_a_curve_counts_for_a_while(tmp_path, age_s, ttl_s, counts):
    save_curve(tmp_path, KEY, CURVE)
    path = curve_path(tmp_path, KEY)
    path.write_text(json.dumps({**json.loads(path.read_text()), "measured_at": time.time() - age_s}))
    assert (load_curve(tmp_path, ttl_s, KEY) is not None) == counts


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"key": {"model": "full"}},
        {"points": []},
        {"points": [[1, 2, 3]]},
        {"points": [["1", 2.0]]},
        {"points": [[1, float("nan")]]},
        {"points": [[1, 2.0], [1, 3.0]]},
        {"points": [[-1, 2.0]]},
        {"points": None},
        {"max_padded_rows": 7},
        {"max_padded_rows": None},
        {"measured_at": "noon"},
        {"measured_at": None},
    ],
)
def test_foreign_files_are_passed_over_and_named(tmp_path, caplog, change):
    save_curve(tmp_path, KEY, CURVE)
    path = curve_path(tmp_path, KEY)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert load_curve(tmp_path, 3600, KEY) is None
    assert str(path) in caplog.text
    save_curve(tmp_path, KEY, CURVE)
    assert load_curve(tmp_path, 3600, KEY) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b"null", b"[" * 100_000])
def test_damaged_files_are_passed_over_and_named(tmp_path, caplog, content):
    path = curve_path(tmp_path, KEY)
    path.write_bytes(content)
    assert load_curve(tmp_path, 3600, KEY) is None
    assert str(path) in caplog.text


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        save_curve(blocked, KEY, CURVE)
    assert "could not be stored" in caplog.text
    assert load_curve(blocked, 3600, KEY) is None


def _write_and_read(directory, number):
    """Write curves that contain only ``number``; returns the number of reads that found another content than a process wrote."""
    wrong = 0
    for _ in range(40):
        save_curve(directory, KEY, CostCurve(range(1, 200), [float(number + 1)] * 199))
        found = load_curve(directory, 3600, KEY)
        wrong += found is None or len(set(found.profile_ms.tolist())) != 1
    return wrong


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path):
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(_write_and_read, [tmp_path] * 3, range(3))) == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 1


def test_points_of_other_sizes_are_not_used(tmp_path, caplog):
    """A damaged digit must not lead to an allocation of gigabytes."""
    key = {**KEY, "sizes": "[1, 8, 64]"}
    save_curve(tmp_path, key, CURVE)
    (file,) = tmp_path.iterdir()
    assert load_curve(tmp_path, 60, key) is not None
    for damaged in ("[800000000000, ", "[8.0, ", "[null, "):
        text = file.read_text()
        file.write_text(text.replace("[8, ", damaged, 1) if "[[" in text else text)
        assert load_curve(tmp_path, 60, key) is None
        assert "they are measured again" in caplog.text
        file.write_text(text)
