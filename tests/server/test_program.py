"""``deepinfer serve`` with the model ``nano``: grammars, equality with ``LLM``, and the ends of the process."""

import base64
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from typing import Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import SERVE, Program
from tests.server.test_chat import picture

HI = [{"role": "user", "content": "hi"}]
ASK = {"model": "random", "messages": HI}
TOOL = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["colour", "n"],
        },
    },
}


@pytest.fixture
def client(program):
    with openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_the_banner_has_a_command_that_works(program):
    assert re.search(r"memory +[0-9.]+ MiB of weights and [0-9.]+ [MG]iB of cache for [0-9,]+ tokens on cpu\n", program.banner)
    assert "context of 16,384 tokens" in program.banner
    command = program.banner.partition("  try ")[2].strip()
    body = json.loads(shlex.split(command)[-1]) | {"max_tokens": 3, "ignore_eos": True}
    words = [*shlex.split(command)[:-1], json.dumps(body)]
    done = subprocess.run([words[0], "-s", *words[1:]], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["finish_reason"] == "length"


def test_an_evaluation_sees_whether_a_text_is_the_most_likely_one(client):
    """As lm-eval asks: a token is the most likely one if its log-probability equals the greatest of its top list."""
    prompt = [0, 70, 80, 90]
    fields = {"model": "random", "temperature": 0, "max_tokens": 1, "seed": 1234}
    likely = client.completions.create(**fields | {"max_tokens": 8}, prompt=prompt, logprobs=1, extra_body={"ignore_eos": True})
    ending = [next(iter(each)) for each in likely.choices[0].logprobs.top_logprobs]
    ids = [3 + (ord(each) if len(each) == 1 else int(each[-2:], 16)) for each in ending]  # the ids of bytes begin at 3

    def scored(ids):
        (choice,) = client.completions.create(**fields, prompt=ids, echo=True, logprobs=1).choices
        pairs = zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
        return choice.logprobs, [logprob == max(top.values()) for logprob, top in pairs if top]

    logprobs, is_likely = scored(prompt + ids)
    assert all(is_likely[len(prompt) - 1 : -1])
    assert logprobs.token_logprobs[len(prompt) : -1] == pytest.approx(likely.choices[0].logprobs.token_logprobs, abs=1e-4)
    changed = [*prompt, *ids[:3], (ids[3] - 2) % 256 + 3, *ids[4:]]
    _, is_likely = scored(changed)
    assert all(is_likely[len(prompt) - 1 : len(prompt) + 2])
    assert not is_likely[len(prompt) + 2]


def test_a_chat_repeats_with_its_seed_and_finds_its_prefix(client):
    fields = ASK | {"max_tokens": 12, "seed": 5}
    long = fields | {"messages": [{"role": "user", "content": "many words " * 40}]}
    first = client.chat.completions.create(**long)
    second = client.chat.completions.create(**long)
    assert first.choices[0].message == second.choices[0].message
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    other = client.chat.completions.create(**long, extra_body={"cache_salt": "mine"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("thinking", "choice"),
    [
        pytest.param({"type": "disabled"}, {"type": "function", "function": {"name": "pick"}}, marks=pytest.mark.slow),
        ({"type": "enabled", "budget_tokens": 4}, "required"),
    ],
)
def test_forced_calls_follow_their_schema(client, thinking, choice):
    answer = client.chat.completions.create(
        **ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, seed=1, max_tokens=400,
        extra_body={"thinking": thinking},
    ).choices[0]  # fmt: skip
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["colour"] in ("red", "blue")
    assert 0 <= arguments["n"] <= 9


class Wheel(BaseModel):
    side: Literal["left", "right"]


class Car(BaseModel):
    colour: Literal["red", "blue"]
    wheel: Wheel


HELPERS = {
    "chat": lambda c, _: c.chat.completions.parse(**ASK, response_format=Car, extra_body=SHORT).choices[0].message.parsed,
    "messages": lambda _, c: c.messages.parse(**MESSAGE, output_format=Car).parsed_output,
    "responses": lambda c, _: c.responses.parse(model="random", input="hi", text_format=Car, extra_body=SHORT).output_parsed,
    "calls": lambda c, _: c.chat.completions.parse(
        **ASK, tools=[openai.pydantic_function_tool(Car)], tool_choice="required", parallel_tool_calls=False, extra_body=SHORT
    ).choices[0].message.tool_calls[0].function.parsed_arguments,
    "tools": lambda _, c: Car.model_validate(c.messages.create(**MESSAGE, tools=[ORDER], tool_choice=ONE).content[-1].input),
}  # fmt: skip
SHORT = {"thinking_token_budget": 2, "seed": 3}
MESSAGE = {"model": "random", "messages": HI, "max_tokens": 600, "thinking": {"type": "disabled"}, "extra_body": {"seed": 4}}
ORDER = {"name": "order", "input_schema": Car.model_json_schema()}
ONE = {"type": "any", "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    "helper", ["messages", *(pytest.param(each, marks=pytest.mark.slow) for each in HELPERS if each != "messages")]
)
def test_helpers_read_a_nested_model_from_a_network_that_knows_nothing(client, program, helper):
    """The grammar alone makes the answer right."""
    with anthropic.Anthropic(base_url=program.url, api_key="none", max_retries=0) as claude:
        assert isinstance(HELPERS[helper](client, claude), Car)


def test_formats_are_followed_after_the_budget_of_reasoning(client):
    fields = {"seed": 2, "max_tokens": 300, "extra_body": {"thinking_token_budget": 4}}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/c"}},
        "required": ["a"],
        "$defs": {"c": {"enum": ["x", "y"]}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(**ASK, response_format=form, **fields).choices[0]
    assert json.loads(answer.message.content) in ({"a": "x"}, {"a": "y"})
    fields["extra_body"] = fields["extra_body"] | {"response_format": {"type": "regex", "regex": "(yes|no)!"}}
    assert client.chat.completions.create(**ASK, **fields).choices[0].message.content in ("yes!", "no!")


def test_a_schema_that_cannot_be_enforced_is_a_client_error(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(**ASK, response_format=form)


def test_an_image_counts_what_it_takes(client, program):
    url = "data:image/png;base64," + base64.b64encode(picture(60, 40)).decode()
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    usage = client.chat.completions.create(model="random", messages=[{"role": "user", "content": content}], max_tokens=2).usage
    item = {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]}
    counted = client.responses.input_tokens.count(model="random", input=[item])
    assert counted.input_tokens == usage.prompt_tokens
    bare = client.responses.input_tokens.count(model="random", input=[{"role": "user", "content": "see"}])
    assert counted.input_tokens - bare.input_tokens > 1


def test_prompt_log_probabilities(client):
    answer = client.completions.create(model="random", prompt=[0, 70, 80], echo=True, logprobs=1, max_tokens=1, temperature=0)
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None
    assert all(each < 0 for each in found.token_logprobs[1:])
    assert len(found.tokens) == len(found.top_logprobs) == len(found.text_offset) == 4


def test_an_abort_frees_the_engine_at_once(program):
    body = ASK | {"stream": True, "max_tokens": 8000, "ignore_eos": True}
    for _ in range(5):
        with httpx.stream("POST", f"{program.url}/v1/chat/completions", json=body, timeout=60) as answer:
            next(answer.iter_bytes())
    deadline = time.monotonic() + 2
    while 'deepinfer_num_requests_running{engine="0"} 0.0' not in httpx.get(f"{program.url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def open_stream(url, body, headers=None, path="/v1/chat/completions"):
    """A stream in a thread; returns the thread and its list of bytes."""
    got, begun = [], threading.Event()

    def read():
        with httpx.stream("POST", f"{url}{path}", json=body, headers=headers, timeout=60) as answer:
            for piece in answer.iter_bytes():
                got.append(piece)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread, got


def test_a_drain_finishes_streams_and_a_second_signal_aborts_them():
    endless = ASK | {"stream": True, "max_tokens": 12000, "ignore_eos": True}
    with Program("--drain-s", "60") as made:
        thread, got = open_stream(made.url, endless)
        short, all_of_it = open_stream(made.url, endless | {"max_tokens": 20})
        made.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert httpx.get(f"{made.url}/ready").status_code == 503
        assert httpx.post(f"{made.url}/v1/chat/completions", json=ASK).status_code == 503
        short.join(60)
        assert b"".join(all_of_it).endswith(b"data: [DONE]\n\n")
        assert made.end()[0] == 0
        thread.join(10)
    assert b'"error"' in got[-1]


@pytest.mark.slow
def test_the_admin_api_drains_with_an_open_stream():
    """The token comes from the environment, so no other user of the machine sees it."""
    with Program("--admin-port", str(free_port()), DEEPINFER_ADMIN_TOKEN="secret", DEEPINFER_API_KEY="one,two") as made:
        headers = {"authorization": "Bearer two"}
        assert httpx.post(f"{made.url}/v1/chat/completions", json=ASK).status_code == 401
        body = ASK | {"stream": True, "max_tokens": 60, "ignore_eos": True}
        thread, got = open_stream(made.url, body, headers)
        admin = made.url.rpartition(":")[0] + ":" + made.process.args[made.process.args.index("--admin-port") + 1]
        assert httpx.post(f"{admin}/drain").status_code == 401
        assert httpx.post(f"{admin}/drain", headers={"authorization": "Bearer secret"}).json() == {"draining": True}
        code, _ = made.wait()
        thread.join(10)
        assert b"".join(got).endswith(b"data: [DONE]\n\n")
        assert code == 0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_dead_engine_ends_every_stream_with_an_error_and_the_server_with_1():
    bodies = {
        "/v1/chat/completions": ASK,
        "/v1/completions": {"model": "random", "prompt": [[5, 6], [7, 8]]},
        "/v1/responses": {"model": "random", "input": "hi"},
        "/v1/messages": ASK,
    }
    fields = {"stream": True, "ignore_eos": True}
    limits = {"/v1/responses": {"max_output_tokens": 12000}}
    with Program() as made:
        streams = [
            open_stream(made.url, body | fields | limits.get(path, {"max_tokens": 12000}), path=path)
            for path, body in bodies.items()
        ]
        children = subprocess.run(
            ["pgrep", "-P", str(made.process.pid), "-f", "deepinfer.engine.process"], capture_output=True, text=True, check=True
        )
        os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
        code, _ = made.wait()
        assert code == 1
        for thread, got in streams:
            thread.join(10)
            last = json.loads(b"".join(got).rpartition(b"data: ")[2])
            assert (last.get("error") or last["response"]["error"])["message"]


def test_settings_that_cannot_work_are_one_sentence():
    for options in (["--admin-port", "1"], ["--max-waiting", "0"], ["--served-model-name", ","]):
        done = subprocess.run([*SERVE, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "Error: " in done.stderr
