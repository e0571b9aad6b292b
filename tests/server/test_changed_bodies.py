"""Bodies of real clients with random changes: every answer is a success or an error of the client."""

import copy
import random

import httpx
import pytest

from tests.server.scripted import call_of, calls_of
from tests.server.test_chat import WEATHER
from tests.server.test_messages import CLAUDE_CODE, CODEX

CHAT = {
    "model": "nano",
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "c",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "temperature": 0.5,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 30,
    "n": 2,
    "seed": 3,
}
COMPLETION = {
    "model": "nano",
    "prompt": ["a", "b"],
    "echo": True,
    "logprobs": 1,
    "n": 2,
    "stop": ["c"],
    "max_tokens": 4,
    "stream": False,
    "stream_options": None,
    "logit_bias": {"5": 1},
    "seed": 1,
}
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**20,
    1e308,
    "",
    "x",
    "auto",
    "☃",
    [],
    {},
    [[]],
    [None],
    {"type": "x"},
    {"type": None},
    {"a": 1},
]


def places(value, path=()):
    """Paths of all parts of a body."""
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def changed(body, rng):
    """A copy with one to three parts replaced, removed, doubled or named otherwise."""
    made = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([each for each in places(made) if each])
        owner = made
        for key in path[:-1]:
            owner = owner[key]
        match rng.randrange(4):
            case 0 | 1:
                owner[path[-1]] = copy.deepcopy(rng.choice(VALUES))
            case 2:
                del owner[path[-1]]
            case 3 if isinstance(owner, dict):
                owner[rng.choice(["type", "content", "name", "extra"])] = copy.deepcopy(owner[path[-1]])
            case 3:
                owner.append(copy.deepcopy(owner[path[-1]]))
    return made


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", CODEX),
        ("/v1/messages", CLAUDE_CODE),
        ("/v1/messages/count_tokens", CLAUDE_CODE),
    ],
    ids=["chat", "completions", "responses", "messages", "count"],
)
def test_changed_bodies_never_fail_the_server(server, path, body, count):
    rng = random.Random(f"{path} {count}")
    server.engine.say("a</think>b" + calls_of(call_of("get_weather", city="Rome")))
    server.engine.chunk = 50
    seen = {}
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for _ in range(count):
            made = changed(body, rng)
            answer = client.post(path, json=made)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (answer.text, made)
            assert "the server failed" not in answer.text, made
    assert seen[200] > count // 20
    assert seen[400] > count // 20
