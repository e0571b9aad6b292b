"""The command line, as a user sees it."""

import json

import pytest
from click.testing import CliRunner

from deepinfer.cli import main

FAST = ["--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "4"]


def run(*args):
    return CliRunner().invoke(main, [str(each) for each in args])


def test_generate_streams_a_continuation():
    result = run("generate", "Hello", "--max-tokens", 5, "--temperature", 0, *FAST)
    assert result.exit_code == 0
    assert "output 5 tokens" in result.stderr
    assert result.stdout.strip()


def test_seeded_generation_repeats():
    first, second = (run("generate", "Hello", "--max-tokens", 8, "--seed", 3, *FAST).stdout for _ in range(2))
    assert first == second


def test_batch_writes_a_line_for_every_prompt(tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "one", "id": "first", "max_tokens": 3},
        {"prompt_token_ids": [0, 5, 6], "top_logprobs": 2, "ignore_eos": True},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    result = run("generate", "--prompts", prompts, "--out", out, "--max-tokens", 4, "--temperature", 0, *FAST)
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["id"] for each in written] == ["first", 1]
    assert [each["prompt_tokens"] for each in written] == [4, 3]
    assert written[1]["output_tokens"] == len(written[1]["token_ids"]) == len(written[1]["top_logprobs"]) == 4
    assert "2 prompts in" in result.stdout


SHAPED = ["--min-p", 0.01, "--presence-penalty", 0.5, "--frequency-penalty", 0.5, "--repetition-penalty", 1.1,
          "--logit-bias", "5:-1.5", "--logit-bias", "6:2", "--stop-token-id", 7, "--banned-token-id", 9,
          "--first-n-token-no-eos", 2]  # fmt: skip


def test_several_answers_are_written_one_after_the_other():
    result = run("generate", "Hello", "--n", 3, "--max-tokens", 4, "--seed", 3, "--ignore-eos", *SHAPED[:2], *FAST)
    assert result.exit_code == 0, result.output
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("--- answer")) == [
        f"--- answer {number} of 3, finished by length" for number in (1, 2, 3)
    ]
    assert "output 12 tokens" in result.stderr


def test_batch_writes_a_line_for_every_answer(tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "one", "n": 2, "logit_bias": {"5": -3}, "golden_token_ids": [70, 71]}, {"prompt": "two"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    result = run("generate", "--prompts", prompts, "--out", out, "--max-tokens", 2, *SHAPED, *FAST)
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["id"], each.get("sample")) for each in written] == [(0, 0), (0, 1), (1, None)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no prompt was given"),
        (("x", "--n", "0"), "n=0"),
        (("x", "--min-p", "2"), "min_p=2.0"),
        (("x", "--logit-bias", "5"), "--logit-bias 5 is not of the form ID:VALUE"),
        (("x", "--logit-bias", "5:x"), "not of the form ID:VALUE"),
        (("x", "--logit-bias", "5:101"), "token 5 is 101.0"),
        (("x", "--stop-token-id", "999", *FAST), "stop_token_ids has 999"),
        (("x", "--file", "y"), "TEXT and --file were given"),
        (("--file", "no-such-file"), "cannot read no-such-file"),
        (("--prompts", "p.jsonl"), "give both"),
        (("x", "--temperature", "-1"), "temperature=-1.0"),
        (("x", "--top-p", "7"), "top_p=7.0"),
        (("x", "--model", "no-such-model"), "neither a directory nor a known name"),
        (("x", "--max-tokens", "many"), "not a valid integer"),
        (("x" * 400, *FAST), "leaves no room for output in the context limit of 256"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(args, says):
    result = run("generate", *args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no prompts"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 needs an object with either"),
        ('{"prompt": "a"}\n{"prompt": "b", "prompt_token_ids": [1]}', "line 2 needs an object"),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature'"),
        ('{"prompt": "a", "top_k": 0}', "line 1: top_k=0"),
        ('{"prompt_token_ids": [9999]}', "token id 9999"),
        ('{"prompt": 5}', "prompts are strings"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, content, says):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(content)
    result = run("generate", "--prompts", prompts, "--out", tmp_path / "out.jsonl", *FAST)
    assert result.exit_code == 2
    assert says in result.stderr


def test_inspect_prints_the_published_totals():
    result = run("inspect")
    assert result.exit_code == 0
    for number in ("96,085", "510,286,023,000", "551,880,835,184", "763,205,315,794"):
        assert number in result.stdout


def test_inspect_refuses_what_is_no_model():
    result = run("inspect", "nowhere")
    assert result.exit_code == 2
    assert "neither full, nano, golden nor a directory" in result.stderr


def test_every_command_explains_itself():
    for args in (
        ["--help"],
        ["generate", "--help"],
        ["inspect", "--help"],
        ["bench", "--help"],
        ["bench", "steps", "--help"],
        ["bench", "batching", "--help"],
        ["bench", "spec", "--help"],
    ):
        result = run(*args)
        assert result.exit_code == 0
        assert len(result.output) > 150


def test_steps_benchmark_prints_rates_floors_and_families():
    result = run("bench", "steps", "--device", "cpu", "--prompt-tokens", 64, "--repeats", 1)
    assert result.exit_code == 0, result.output
    for word in ("tokens/s", "share of floor", "prefill, 1 prompt of 64", "attention", "quant", "moe", "no drafts"):
        assert word in result.stdout


def test_steps_benchmark_tells_drafting_from_the_rest():
    result = run("bench", "steps", "--device", "cpu", "--prompt-tokens", 64, "--repeats", 1, "--num-drafts", 2)
    assert result.exit_code == 0, result.output
    for word in ("rounds of 2 drafts, 16 requests at 64", "share of drafting", "every step above drafts"):
        assert word in result.stdout


def test_batching_benchmark_says_that_it_drafts_nothing_unless_asked():
    result = run("bench", "batching", "--device", "cpu", "--requests", 2, "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert "no drafts: what is measured is batching" in result.stdout


def test_speculation_changes_no_seeded_text():
    arguments = ("generate", "Once", "--device", "cpu", "--max-tokens", 8, "--seed", 5, "--ignore-eos", "--max-num-seqs", 2)
    plain = run(*arguments, "--num-drafts", 0)
    assert plain.exit_code == 0, plain.output
    for given in (("--num-drafts", 3), ("--num-drafts", 2, "--adaptive-drafts"), ("--no-adaptive-drafts",)):
        assert run(*arguments, *given).stdout == plain.stdout
    refused = run(*arguments, "--num-drafts", 6)
    assert refused.exit_code == 2
    assert "use 0 to 5" in refused.stderr
    assert run(*arguments, "--draft-sampling", "argmax").exit_code == 0
