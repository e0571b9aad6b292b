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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no prompt was given"),
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
    for args in (["--help"], ["generate", "--help"], ["inspect", "--help"], ["bench", "--help"], ["bench", "steps", "--help"]):
        result = run(*args)
        assert result.exit_code == 0
        assert len(result.output) > 150


def test_steps_benchmark_prints_rates_floors_and_families():
    result = run("bench", "steps", "--device", "cpu", "--prompt-tokens", 64, "--repeats", 1)
    assert result.exit_code == 0, result.output
    for word in ("tokens/s", "share of floor", "prefill, 1 prompt of 64", "attention", "quant", "moe"):
        assert word in result.stdout
