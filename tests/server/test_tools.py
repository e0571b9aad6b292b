"""Load generators and lm-eval run to their ends with the commands of ``docs/serving.md``, and count what the server counts."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from deepinfer.engine.loader import model_directory
from tests.server.conftest import Program

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def nano():
    with Program("--model", "nano", "--max-model-len", "4096") as made:
        yield made
        code, log = made.end()
        assert code == 0, log


def ran(nano, tool, folder):
    """Run the commands of a tool; returns what the server counted meanwhile."""
    if shutil.which(tool) is None:
        pytest.skip(f"the command {tool} is not installed")
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.DOTALL)
    (script,) = [each for each in blocks if re.search(rf"^(\w+=\S+ )?{tool} ", each)]
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"TOK": str(model_directory("nano"))}
    before = counted(nano)
    done = subprocess.run(
        ["bash", "-euc", script.replace("http://127.0.0.1:8000", nano.url)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    after = counted(nano)
    return {name: after[name] - before[name] for name in after}


def counted(nano):
    text = httpx.get(f"{nano.url}/metrics").text
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "time_to_first_token_seconds_sum",
    )
    return {name: float(re.search(rf'^deepinfer_{name}\{{engine="0"\}} (\S+)$', text, re.MULTILINE)[1]) for name in names}


def check(told, *, num_requests, num_prompt, num_output, ttft_s):
    assert told["time_to_first_token_seconds_count"] == num_requests == 24
    assert told["prompt_tokens_total"] == num_prompt
    assert told["generation_tokens_total"] == num_requests * 32
    # The usage of conversations leaves the end token out, which ignore_eos lets pass in the middle of an answer.
    assert num_requests * 31 <= num_output <= num_requests * 32
    engine_s = told["time_to_first_token_seconds_sum"] / num_requests
    assert engine_s <= ttft_s < 1.1 * engine_s + 0.05


@pytest.mark.slow
def test_guidellm_counts_what_the_server_counts(nano, tmp_path):
    told = ran(nano, "guidellm", tmp_path)
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    requests, metrics = benchmark["requests"]["successful"], benchmark["metrics"]
    assert not benchmark["requests"]["errored"]
    check(
        told,
        num_requests=len(requests),
        num_prompt=sum(each["input_metrics"]["text_tokens"] for each in requests),
        num_output=sum(each["output_metrics"]["text_tokens"] for each in requests),
        ttft_s=metrics["time_to_first_token_ms"]["successful"]["mean"] / 1000,
    )


@pytest.mark.slow
def test_aiperf_counts_what_the_server_counts(nano, tmp_path):
    told = ran(nano, "aiperf", tmp_path)
    found = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text())
    check(
        told,
        num_requests=found["request_count"]["avg"],
        num_prompt=found["total_usage_prompt_tokens"]["avg"],
        num_output=found["total_usage_completion_tokens"]["avg"],
        ttft_s=found["time_to_first_token"]["avg"] / 1000,
    )


@pytest.mark.slow
def test_lm_eval_scores_texts_and_answers(nano, tmp_path):
    ran(nano, "lm_eval", tmp_path)
    scores = {}
    for path in tmp_path.glob("lm_eval/**/results_*.json"):
        scores |= json.loads(path.read_text())["results"]
    assert scores["agreement"]["acc,none"] > 0.75
    assert 0 < scores["endings"]["acc,none"] < 1
    assert scores["sums"]["exact_match,number"] > 0.9
