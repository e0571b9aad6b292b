"""The command line, as a user sees it."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import deepinfer.engine.llm
from deepinfer.cli import main
from deepinfer.config import config_json, named_config
from deepinfer.engine.files import OutputFile, ResultLines
from deepinfer.engine.jsonl import read_prompts
from deepinfer.errors import RequestError, StepFailed
from deepinfer.request import FinishReason, RequestOutput
from deepinfer.tokenizer import byte_tokenizer

FAST = ["--model", "random", "--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "4"]


def run(*args):
    return CliRunner().invoke(main, [str(each) for each in args])


def test_generate_streams_a_continuation():
    result = run("generate", "Hello", "--max-tokens", 5, "--temperature", 0, *FAST)
    assert result.exit_code == 0
    assert "output 5 tokens" in result.stderr
    assert result.stdout.strip()
    assert "random is a small model with random weights: its text has no meaning" in result.stderr
    assert "\r" not in result.stderr, "no bars in a log"
    assert result.stderr.count("\n") == 2


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
        ('{"prompt": "a"}\n\n{"prompt": "b"', "line 3 is not JSON"),
        ('{"prompt": "a", "id": true}', "line 1 has id=True; give a string or a whole number"),
        ('{"prompt": "a", "id": 1.5}', "line 1 has id=1.5"),
        ('{"prompt": "a", "id": ["x"]}', "line 1 has id=a list of 1; give a string"),
        ('{"prompt": null}', "line 1 has prompt=None; prompts are strings"),
        ('{"prompt": ["a"]}', "prompts are strings"),
        ('{"prompt_token_ids": "abc"}', "line 1 has prompt_token_ids='abc'; give a list"),
        ('{"prompt_token_ids": []}', "give a list of at least one token id"),
        ('{"prompt_token_ids": [1, true]}', "line 1: prompt_token_ids has True at position 1"),
        ('{"prompt": "a"}\n{"prompt_token_ids": [1.0]}', "line 2: prompt_token_ids has 1.0 at position 0"),
        ('{"prompt_token_ids": [-1]}', "token id -1"),
        ('{"prompt_token_ids": [270]}', "line 1: the prompt has 1 image placeholder"),
        ('{"prompt": "a", "stop_token_ids": [300]}', "line 1: stop_token_ids has 300"),
        ('{"prompt": "' + "x" * 300 + '"}', "line 1: text of 300 characters, which is at least 301 tokens, leaves no room"),
        ('{"prompt": "a", "temperature": NaN}', "line 1 has NaN, which is not JSON"),
        ('{"prompt": "a", "temperature": 1e999}', "line 1: temperature=inf"),
        ('{"prompt": "a", "top_k": ' + "1" * 5000 + "}", "line 1 has a whole number of 5000 digits"),
        ('{"prompt": "a", "prompt": "b"}', "line 1 has the key 'prompt' twice"),
        ('{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "line 1 has the key '1' twice"),
        ('{"prompt": "a", "id": ' + "[" * 100_000, "line 1 is nested too deeply"),
        ('{"prompt": "a \\ud800"}', "line 1 has a lone surrogate at character 2 of prompt"),
        ('{"prompt": "a", "id": "\\udfff"}', "line 1 has a lone surrogate at character 0 of id"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2 is not UTF-8 text (byte 12)"),
        ('{"prompt": "a"}'.encode("utf-16"), "line 1 is not UTF-8 text (byte 0)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_prompt_files_name_the_line(tmp_path, monkeypatch, content, says):
    monkeypatch.setattr(deepinfer.engine.llm, "LLM", None)  # no model is loaded
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run("generate", "--prompts", prompts, "--out", tmp_path / "out.jsonl", *FAST)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a\u2028b"}\n{"prompt": "c"}\n',
        '\ufeff{"prompt": "a\u2028b"}\n{"prompt": "c"}',
        '{"prompt": "a\\u2028b"}\r\n\r\n  \r\n{"prompt": "c"}\r\n',
        '{"prompt": "a\u2028b"}\n\n\n{"prompt": "c", "id": null}',
    ],
)
def test_lines_end_at_line_feeds_only(tmp_path, content):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content.encode())
    assert [line.prompt for line in read_prompts(path, {})] == ["a\u2028b", "c"]


# With a fake model: what the command writes, and when.

TOKENIZER = byte_tokenizer()
ODD = "a\u2028b\u2029c\x85d\x0ce é 漢 \ufeff"


def answer(text, sample=0):
    ids = TOKENIZER.encode(text)
    return [
        RequestOutput(
            request_id="0",
            prompt_len=2,
            token_id=each,
            finished=number == len(ids),
            finish_reason=FinishReason.LENGTH if number == len(ids) else None,
            num_output_tokens=number,
            max_num_batched_tokens=64,
            sample_idx=sample,
        )
        for number, each in enumerate(ids, start=1)
    ]


@pytest.fixture
def fake(monkeypatch):
    """A model whose completions a test chooses: numbers of prompts that complete, and an error that is raised then."""
    told = SimpleNamespace(script=[], is_loaded=False, before=lambda: None, text=ODD)

    class FakeLLM:
        config = named_config("random")

        def __init__(self, **_engine):
            told.is_loaded = True

        def get_tokenizer(self):
            return TOKENIZER

        def text(self, records):
            return TOKENIZER.decode([each.token_id for each in records])

        def completions(self, _ids, params):
            for each in told.script:
                told.before()
                if isinstance(each, BaseException):
                    raise each
                yield each, [answer(f"{each} {told.text}", sample) for sample in range(params[each].n)]

    monkeypatch.setattr(deepinfer.engine.llm, "LLM", FakeLLM)
    return told


@pytest.fixture
def three(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "id": text}) + "\n" for text in "abc"))
    return path


def batch(prompts, out):
    return run("generate", "--prompts", prompts, "--out", out, *FAST)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_are_in_the_order_of_the_prompts_and_read_back_by_any_reader(fake, three, tmp_path):
    fake.script = [2, 0, 1]
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    out.chmod(0o600)
    fake.before = lambda: (out.read_text() == "old") or pytest.fail("the old results are touched")
    result = batch(three, out)
    assert result.exit_code == 0, result.output
    assert [each["id"] for each in lines_of(out)] == ["a", "b", "c"]
    assert [each["text"] for each in lines_of(out)] == [f"{number} {ODD}" for number in range(3)]
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
    assert out.stat().st_mode & 0o777 == 0o600
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps({"prompt": each["text"]}, ensure_ascii=False) + "\n" for each in lines_of(out)))
    assert [line.prompt for line in read_prompts(again, {})] == [each["text"] for each in lines_of(out)]


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (StepFailed("a device fell off"), 2), (MemoryError(), 2), (RequestError("too late"), 2)],
    ids=repr,
)
def test_what_was_finished_is_never_lost(fake, three, tmp_path, error, code):
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    out.write_text("old")
    fake.script = [1, 0, error]
    seen = []
    fake.before = lambda: seen.append(len(partial.read_text().splitlines()))
    result = batch(three, out)
    assert seen == [0, 1, 2], "a result is on disk before the next one comes"
    assert result.exit_code == code
    assert out.read_text() == "old"
    assert [each["id"] for each in lines_of(partial)] == ["b", "a"]
    said = result.stderr.splitlines()[-1]
    assert f"{partial} holds the results of 2 of 3 prompts" in said
    assert "Traceback" not in result.output


def test_without_a_result_nothing_is_left(fake, three, tmp_path):
    fake.script = [KeyboardInterrupt()]
    result = batch(three, tmp_path / "out.jsonl")
    assert result.exit_code == 130
    assert "Interrupted; no result was written" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("way", ["same", "relative", "symlink", "hard link", "partial", "link to partial"])
def test_results_never_go_where_the_prompts_are(fake, three, tmp_path, monkeypatch, way):
    before = three.read_bytes()
    monkeypatch.chdir(tmp_path)
    prompts, out = three, three
    if way == "relative":
        out = "./x/../in.jsonl"
        (tmp_path / "x").mkdir()
    elif way == "symlink":
        out = tmp_path / "link"
        out.symlink_to(three)
    elif way == "hard link":
        out = tmp_path / "link"
        out.hardlink_to(three)
    elif way.endswith("partial"):
        prompts, out = three.rename(tmp_path / "r.partial"), "r"
        if way.startswith("link"):
            prompts = tmp_path / "p"
            prompts.symlink_to("r.partial")
    result = run("generate", "--model", "typo", "--prompts", prompts, "--out", out)
    assert result.exit_code == 2
    assert "are the same file, which writing would destroy; name another file to write" in result.stderr
    assert not fake.is_loaded
    assert (three if three.exists() else tmp_path / "r.partial").read_bytes() == before


def test_a_model_that_is_not_there_costs_no_results(three, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    result = run("generate", "--model", "typo", "--prompts", three, "--out", out)
    assert result.exit_code == 2
    assert out.read_text() == "old"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("missing/out.jsonl", "No such file or directory"),
        ("in.jsonl/out.jsonl", "Not a directory"),
        (".", "it is a directory"),
        ("/proc/out.jsonl", "cannot write /proc/out.jsonl"),
        ("loop", "cannot write"),
        ("/dev/stdin", "cannot write"),
        ("x" * 300, "File name too long"),
    ],
)
def test_places_that_cannot_be_written_are_found_before_the_model_is_loaded(fake, three, tmp_path, place, says):
    (tmp_path / "loop").symlink_to("loop")
    result = batch(three, tmp_path / place)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not fake.is_loaded


def test_a_link_is_followed_and_a_long_name_needs_no_room_for_another(fake, three, tmp_path):
    (tmp_path / "folder").mkdir()
    link, target, long = tmp_path / "link", tmp_path / "folder" / "real.jsonl", tmp_path / ("x" * 250)
    link.symlink_to(target)
    long.write_text("old" * 1000)
    for out, real in ((link, target), (long, long)):
        fake.script = [1, 2, 0]
        assert batch(three, out).exit_code == 0
        assert [each["id"] for each in lines_of(real)] == ["a", "b", "c"]
    assert link.is_symlink()


def test_pipes_and_devices_are_written_in_order(fake, three, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    fake.script = [2, 0, 1]
    assert batch(three, pipe).exit_code == 0
    reader.join()
    assert [json.loads(line)["id"] for line in read[0].splitlines()] == ["a", "b", "c"]
    assert batch(three, "/dev/null").exit_code == 0
    full = batch(three, "/dev/full")
    assert full.exit_code == 2
    assert "Error: cannot write /dev/full: No space left on device; no result was written" in full.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "pipe"}


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_can_be_the_place(fake, three, capfd, place):
    fake.script = [2, 0, 1]
    result = batch(three, place)
    assert result.exit_code == 0
    assert "3 prompts in" in result.stderr
    assert [json.loads(line)["id"] for line in capfd.readouterr().out.splitlines()] == ["a", "b", "c"]


def test_two_runs_do_not_write_one_file(fake, three, tmp_path):
    out = tmp_path / "out.jsonl"
    with ResultLines(OutputFile(out), 1) as results:
        results.write(0, b"first\n")
        fake.script = [0, 1, 2]
        second = batch(three, out)
        assert second.exit_code == 2
        assert "another run writes" in second.stderr
    assert out.read_bytes() == b"first\n"


REAL_PROCESS = textwrap.dedent(
    """
    import sys, time
    import deepinfer.engine.llm
    from deepinfer.cli import main
    from tests.test_cli import TOKENIZER, answer

    class FakeLLM:
        def __init__(self, **_): pass
        def get_tokenizer(self): return TOKENIZER
        def text(self, records): return TOKENIZER.decode([each.token_id for each in records])
        def completions(self, ids, params):
            for number in range(len(ids)):
                yield number, [answer("x" * 300)]
                print("one", file=sys.stderr, flush=True)
                time.sleep(0 if "--go-on" in sys.argv else 30)

    deepinfer.engine.llm.LLM = FakeLLM
    main([each for each in sys.argv[1:] if each != "--go-on"])
    """
)


def real_process(*args, **how):
    how = {"stderr": subprocess.PIPE, **how}
    return subprocess.Popen([sys.executable, "-c", REAL_PROCESS, *map(str, args)], text=True, **how)


def test_ctrl_c_ends_a_real_process_with_one_sentence(three, tmp_path):
    out = tmp_path / "out.jsonl"
    process = real_process("generate", "--prompts", three, "--out", out, *FAST)
    while "one" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said == f"Interrupted; {out}.partial holds the results of 1 of 3 prompts\n"


def test_a_full_disk_keeps_what_was_written_whole(three, tmp_path):
    out = tmp_path / "out.jsonl"
    process = real_process(
        "generate", "--prompts", three, "--out", out, "--go-on", *FAST,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
    )  # fmt: skip
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    last = said.splitlines()[-1]
    assert last.startswith(
        f"Error: cannot write {out}: File too large; {out}.partial holds the results of 1 of 3 prompts; make room"
    )
    assert [each["id"] for each in lines_of(tmp_path / "out.jsonl.partial")] == ["a"]


def test_inspect_prints_the_published_totals():
    result = run("inspect")
    assert result.exit_code == 0
    for number in ("96,085", "510,286,023,000", "551,880,835,184", "763,205,315,794"):
        assert number in result.stdout


@pytest.mark.parametrize("model", ["random", "golden", "directory"])
def test_inspect_works_with_its_own_defaults(model, tmp_path):
    positions = named_config("golden" if model == "directory" else model).max_position_embeddings
    if model == "directory":
        model = tmp_path
        (tmp_path / "config.json").write_text(json.dumps(config_json(named_config("golden"))))
        (tmp_path / "model.safetensors").write_bytes(b"")
    result = run("inspect", model)
    assert result.exit_code == 0, result.output
    assert f"x {positions:,} tokens" in result.stdout
    assert run("inspect", model, "--context", positions).stdout == result.stdout
    longer = run("inspect", model, "--context", positions + 1)
    assert longer.exit_code == 2
    assert longer.stdout == ""
    assert f"context_tokens={positions + 1} exceeds the model's limit of {positions}" in longer.stderr


def test_only_random_is_said_to_have_random_weights():
    assert "random weights" in run("inspect", "random").stderr
    assert run("inspect", "nano").stderr == ""
    assert run("inspect").stderr == ""


def test_the_full_model_is_inspected_at_the_usual_context():
    assert "x 131,072 tokens" in run("inspect").stdout


def test_inspect_refuses_what_is_no_model():
    result = run("inspect", "nowhere")
    assert result.exit_code == 2
    assert "neither full, golden, random, nano nor a directory" in result.stderr


def test_every_command_explains_itself():
    for args in (
        ["--help"],
        ["generate", "--help"],
        ["inspect", "--help"],
        ["bench", "--help"],
        ["bench", "steps", "--help"],
        ["bench", "batching", "--help"],
        ["bench", "spec", "--help"],
        ["bench", "structured", "--help"],
        ["bench", "serve", "--help"],
        ["chat", "--help"],
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
    for word in ("rounds of 2 drafts, 16 requests at 64", "share of drafting", "every step above also makes drafts"):
        assert word in result.stdout


def test_batching_benchmark_says_that_it_drafts_nothing_unless_asked():
    result = run("bench", "batching", "--device", "cpu", "--requests", 2, "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert "no drafts, to measure batching alone" in result.stdout


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


STREAMING = textwrap.dedent(
    r"""
    import sys, types
    from deepinfer.config import named_config
    from deepinfer.tokenizer import byte_tokenizer
    from deepinfer.cli import main

    TOKENIZER = byte_tokenizer()
    IDS = TOKENIZER.encode("\u6f22\xe9 " * 500)

    class FakeLLM:
        config = named_config("random")
        def __init__(self, **_): pass
        def get_tokenizer(self): return TOKENIZER
        def text_token(self, record): return record.token_id
        def prompt_ids(self, text): return [3]
        def stream(self, prompt, params, *, prompt_token_ids):
            for number, each in enumerate(IDS, start=1):
                yield types.SimpleNamespace(sample_idx=0, token_id=each, finished=number == len(IDS), prompt_len=1,
                                            num_output_tokens=number, finish_reason="length")

    sys.modules["deepinfer.engine.llm"] = types.SimpleNamespace(LLM=FakeLLM)  # no torch, because the test is about streams
    main(["generate", "x", "--model", "random"])
    """
)


def streamed(**how):
    how = {"stderr": subprocess.PIPE, **how}
    process = subprocess.Popen([sys.executable, "-c", STREAMING], encoding="utf-8", **how)
    said = process.communicate(timeout=60)
    return process.returncode, *said


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"PYTHONIOENCODING": "ascii"}, ("漢é", r"\u6f22")),
        ({"PYTHONIOENCODING": "latin-1"}, (r"\u6f22é",)),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, ("漢é", r"\u6f22")),
    ],
    ids=str,
)
def test_a_terminal_without_the_characters_is_no_error(variables, shown, tmp_path):
    with (tmp_path / "out").open("wb") as file:
        code, _, said = streamed(env={**os.environ, **variables}, stdout=file)
    assert (code, "Traceback" in said) == (0, False)
    text = (tmp_path / "out").read_text("latin-1" if "latin-1" in variables.values() else "utf-8")
    assert any(each in text for each in shown)


def test_streams_without_a_reader_are_no_error(tmp_path):
    code, _, said = streamed(preexec_fn=lambda: os.close(1))
    assert (code, "Traceback" in said) == (0, False)
    code, text, _ = streamed(preexec_fn=lambda: os.close(2), stdout=subprocess.PIPE)
    assert (code, text.count("漢")) == (0, 500)
    with open("/dev/full", "w") as full:
        code, text, _ = streamed(stderr=full, stdout=subprocess.PIPE)
        assert (code, text.count("漢")) == (0, 500)
        code, _, said = streamed(stdout=full)
        assert code == 2
        assert said.splitlines()[-1] == "Error: cannot write the output: No space left on device; send it elsewhere"


def test_a_reader_that_leaves_ends_it_quietly():
    read, write = os.pipe()
    os.close(read)
    code, _, said = streamed(stdout=write)
    os.close(write)
    assert code == 141
    assert len(said.splitlines()) == 1, "nothing but what random is"


@pytest.mark.parametrize("num_bytes", [300 << 20, 1000 << 20])
def test_too_little_address_space_is_one_sentence(num_bytes):
    ran = subprocess.run(
        [sys.executable, "-m", "deepinfer.cli", "generate", "x", "--max-tokens", "1", *FAST],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes)),
    )  # fmt: skip
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 0 or (ran.returncode == 2 and "memory" in ran.stderr.splitlines()[-1])
