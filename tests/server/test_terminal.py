"""``deepinfer chat`` with a server, and completion in shells."""

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from deepinfer.cli import main
from tests.server.scripted import Server


def chat(server, *args, **given):
    return CliRunner().invoke(main, ["chat", "--url", server if isinstance(server, str) else server.url, *args], **given)


@pytest.mark.parametrize("path", ["", "/", "/v1"])
def test_an_answer_of_a_server_is_printed_with_its_speed(server, path):
    server.engine.say("I think.</think>A moon, ☃.")
    server.engine.drafts = (5, 2)
    result = chat(server.url + path, "What is it?", "--effort", "high")
    assert result.exit_code == 0, result.output
    assert result.stdout == "I think.\n\nA moon, ☃.\n"
    rounds = server.engine.num_steps - 1
    assert f"{2 * rounds} of {5 * rounds} drafts accepted; finished by stop]" in result.stderr
    assert "Reasoning Effort: 75" in server.engine.asked[-1].prompt


def test_a_conversation_keeps_its_history_and_options(server):
    server.engine.say_in_turn("one", "two")
    options = "--temperature 0.5 --seed 7 --logit-bias 100:3 --max-tokens 9 --first-n-token-no-eos 1 --stop-token-id 5"
    result = chat(server, "--system", "Be brief.", *options.split(), input="first\nsecond\n")
    assert result.stdout == "one\ntwo\n"
    asked = server.engine.asked[-1]
    assert all(each in asked.prompt for each in ("Be brief.", "first", "one", "second"))
    params = asked.params
    assert (params.temperature, params.seq_seed, params.bias_pairs, params.max_tokens) == (0.5, 7, ((100, 3.0),), 9)
    assert (params.first_n_token_no_eos, params.stop_token_ids, params.top_p) == (1, (5,), 0.95)


def test_several_answers_and_formats(server, tmp_path):
    server.engine.say("one", "second")
    result = chat(server, "Hi", "--n", "2")
    assert "--- answer 2 of 2, finished by stop\nsecond\n" in result.stdout
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for options, kind in ((["--json-schema", f"@{schema}"], "json"), (["--regex", "a+"], "regex")):
        chat(server, "Hi", *options)
        assert server.engine.asked[-1].params.structured_output.schema_type == kind


def test_a_key_may_come_from_a_file(tmp_path):
    made = Server(api_keys=("secret",))
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert chat(made, "Hi", "--api-key", f"@{key}").exit_code == 0
    refused = chat(made, "Hi")
    assert refused.exit_code == 2
    assert "the API key is missing" in refused.stderr
    made.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cpu"], "--device has no effect with --url"),
        (["--ebnf", "x"], "--ebnf has no effect with --url"),
        (["--model", "gpt"], "the model 'gpt' does not exist; use one of nano, other"),
        (["--json-schema", "{"], "--json-schema is not JSON"),
        (["--json-schema", "{}", "--regex", "a"], "exclude each other"),
        (["--logit-bias", "x"], "--logit-bias x is not of the form ID:VALUE"),
        (["--temperature", "-1"], "temperature=-1.0"),
    ],
)
def test_what_a_server_cannot_do_is_one_sentence(server, options, words):
    result = chat(server, "Hi", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_servers_that_fail_are_one_sentence(server):
    assert "is not an address" in chat("localhost:8000", "Hi").stderr
    assert "cannot be reached" in chat("http://127.0.0.1:9", "Hi").stderr
    server.engine.say("x" * 50)
    server.engine.fail_after = 2
    result = chat(server, "Hi")
    assert result.exit_code == 2
    assert "the server ended the answer: the scripted engine was asked to fail" in result.stderr
    alone = CliRunner().invoke(main, ["chat", "Hi", "--api-key", "x"])
    assert "--api-key needs --url" in alone.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell):
    result = CliRunner().invoke(main, ["--print-completion", shell])
    assert result.exit_code == 0
    assert "_DEEPINFER_COMPLETE" in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "expected"), [("deepinfer se", "plain,serve"), ("deepinfer serve --max-wai", "plain,--max-waiting"),
                            ("deepinfer serve --model na", "plain,nano")]
)  # fmt: skip
def test_commands_options_and_models_are_completed(words, expected):
    env = os.environ | {"_DEEPINFER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = "import sys; sys.argv = ['deepinfer']; from deepinfer.cli import main; main(prog_name='deepinfer')"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert expected in done.stdout.splitlines()
