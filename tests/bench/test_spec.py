"""The speculation benchmark: it marks assumed rounds, and never reports drawn rounds as recorded rounds."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from deepinfer.bench.rounds import assumed_rounds
from deepinfer.bench.spec import analyse, as_json, plot, record_rounds, render, run_spec, write_json
from deepinfer.cli import main
from deepinfer.errors import RequestError
from deepinfer.scheduler.budget import CostCurve
from deepinfer.step import Round, Sampled, StepPlan, StepResult
from tests.engine.harness import build, params, request, tokens

CURVE = CostCurve([8, 16, 64, 128, 600], [5.0, 5.5, 7.0, 9.0, 30.0], max_padded_rows=8)
QUICK = ["--concurrency", "2,3", "--repeats", "1", "--context", "16", "--device", "cpu"]


def report_of(rounds=None, *, is_assumed):
    rounds = rounds or assumed_rounds([0.8, 0.7, 0.6], 400)
    where = {"where": "a machine", "source": "a source"}
    return analyse(rounds, CURVE, (16, 96), **where, is_assumed=is_assumed, layout_ms=(0.25, 0.5))


def run(*args):
    return CliRunner().invoke(main, ["bench", "spec", *map(str, args)])


def test_tables_hold_what_was_found():
    report = report_of(is_assumed=False)
    text = render(report)
    for part in ("conditional acceptance", "ECE fitted", "ms, median", "drafts a request", "verification efficiency"):
        assert part in text
    assert "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE=" in text
    assert f"{report.gains[1].gain:+.1%}" in text
    assert "lays out the rounds of 96 requests: 0.500 ms" in text
    assert "assumed" not in text.lower()


def test_assumed_rounds_are_marked_wherever_they_show():
    text = render(report_of(is_assumed=True))
    titles = [line for line in text.splitlines() if line.startswith(("rounds", "Accep", "Calib", "DEEPINFER", "Estimated"))]
    assert len(titles) == 5
    assert all("ASSUMED" in line for line in titles)
    assert as_json(report_of(is_assumed=True))["is_assumed"] is True


def test_numbers_are_written_as_json(tmp_path):
    report = report_of(is_assumed=False)
    write_json(report, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read == as_json(report)
    assert read["accepted_drafts"] == pytest.approx(read["accepted_length_with_bonus"] - 1)
    assert [each["requests"] for each in read["gain"]] == [16, 96]
    assert read["layout_ms"] == [0.25, 0.5]
    assert CostCurve.from_json(read["step_times"]).sizes.tolist() == CURVE.sizes.tolist()


def test_shortened_rounds_do_not_count():
    rounds = assumed_rounds([0.8, 0.7, 0.6], 400)
    half = rounds.num_verified.copy()
    half[::2] = 1
    report = report_of(dataclasses.replace(rounds, num_verified=half), is_assumed=False)
    assert (report.num_recorded, len(report.rounds)) == (400, 200)
    with pytest.raises(RequestError, match="0 rounds of full length are too few"):
        report_of(dataclasses.replace(rounds, num_verified=half * 0), is_assumed=False)


class Core:
    """An engine whose requests accept one draft fewer in each round; one request has ended, but its last round is in flight."""

    is_idle = property(lambda self: self.left == 0)

    def __init__(self):
        self.added, self.left, self.last_step = [], 3, None

    def add(self, request):
        self.added.append(request)

    def step(self):
        self.left -= 1
        rounds = tuple(
            Round(request_id=name, slot=slot, start=9, max_drafts=2, page_ids=np.ones(1, np.int32))
            for name, slot in (("a", 4), ("ended", 2), ("b", 1))
        )
        sampled = {
            name: Sampled(
                token_ids=(7,) * (1 + self.left),
                logprobs=(-1.0,) * (1 + self.left),
                top_token_ids=((),) * (1 + self.left),
                top_logprobs=((),) * (1 + self.left),
                num_drafts=2 if self.left else 1,
                confidences=(0.5, 0.25)[: 2 if self.left else 1],
            )
            for name in ("a", "ended", "b")
        }
        plan = StepPlan(chunks=(), rounds=rounds, num_drafts=6)
        self.last_step = plan, StepResult(sampled=sampled)
        return [SimpleNamespace(request_id=name) for name in ("a", "b") for _ in range(1 + self.left)]


def test_rounds_are_taken_from_the_engine_until_it_is_idle():
    core = Core()
    request = SimpleNamespace(params=SimpleNamespace(max_tokens=3))
    rounds = record_rounds(core, [request] * 2, 2)
    assert len(core.added) == 2
    assert rounds.num_verified.tolist() == [2, 2, 2, 2, 1, 1]
    assert rounds.num_accepted.tolist() == [2, 2, 1, 1, 0, 0]
    assert rounds.earlier.tolist() == [[1, 1]] * 2 + [[0.5, 0.25]] * 4
    assert rounds.confidences[:4].tolist() == [[0.5, 0.25]] * 4
    assert np.isnan(rounds.confidences[4:]).tolist() == [[False, True]] * 2, "drafts that were not verified have no confidence"
    assert len(rounds.full()) == 4


def test_an_engines_own_rounds_are_counted_as_its_statistics_count_them(seed):
    rng = np.random.default_rng(seed)
    core = build(num_drafts=3, max_model_len=100)
    work = [request(f"r{number}", tokens(rng, 9), params(rng, 9)) for number in range(2)]
    rounds = record_rounds(core, work, 3)
    stats = core.stats()
    assert len(rounds) == stats.num_rounds > 0
    assert [int((rounds.num_verified > at).sum()) for at in range(3)] == list(stats.num_verified_drafts)
    assert [int((rounds.num_accepted > at).sum()) for at in range(3)] == list(stats.num_accepted_drafts)
    core.close()


def test_rounds_recorded_on_the_small_model(tmp_path):
    out = tmp_path / "spec.json"
    result = run("--requests", "6", "--tokens", "32", "--temperature", "0.7", "--json", out, *QUICK)
    assert result.exit_code == 0, result.output
    assert "6 requests of 32 tokens at temperature 0.7, drafts coupled" in result.stdout
    assert "assumed" not in result.stdout.lower()
    read = json.loads(out.read_text())
    assert read["is_assumed"] is False
    assert read["rounds"]["num_recorded"] > read["rounds"]["num_full"] >= 100
    assert len(read["conditional_acceptance"]) == 5
    assert all(ms > 0 for _, ms in read["step_times"]["points"])
    assert [rows for rows, _ in read["step_times"]["points"]] == [8, 16, 18]


def test_assumed_rounds_on_the_small_model(tmp_path):
    out = tmp_path / "spec.json"
    result = run("--acceptance", "0.9,0.8", "--json", out, *QUICK)
    assert result.exit_code == 0, result.output
    assert "ASSUMED" in result.stdout
    assert "Beta(8 a, 8 (1 − a))" in result.stdout
    read = json.loads(out.read_text())
    assert read["is_assumed"] is True
    assert len(read["conditional_acceptance"]) == 2
    assert all(each["step_ms"] > 0 for each in read["gain"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--acceptance", "0.9,x"), "is not a list of numbers"),
        (("--acceptance", "0.9,1.5"), "must be 1 to 5 probabilities"),
        (("--acceptance", "0.9,0.9,0.9,0.9,0.9,0.9"), "must be 1 to 5 probabilities"),
        (("--concurrency", "0"), "must be positive"),
        (("--concurrency", "1.5"), "is not a list of whole numbers"),
        (("--acceptance", "0.9", "--json", "/no/such/folder/out.json"), "cannot write /no/such/folder/out.json"),
    ],
)
def test_bad_options_are_one_sentence(args, says):
    result = run(*args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_a_plot_without_matplotlib_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--acceptance", "0.9", "--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "pip install 'deepinfer[plot]'" in result.stderr


@pytest.mark.parametrize("is_assumed", [False, True])
def test_a_plot_is_drawn(tmp_path, is_assumed):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    plot(report_of(is_assumed=is_assumed), tmp_path / "out.svg")
    drawn = (tmp_path / "out.svg").read_text()
    assert "<svg" in drawn


def test_run_spec_refuses_no_acceptance_at_all():
    with pytest.raises(RequestError, match="must be 1 to 5 probabilities"):
        run_spec("random", acceptance=())
