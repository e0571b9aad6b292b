"""Recorded conversations of agents: each request has the shape that the agent sent to this server.

The folder ``agents`` has one file for each agent.  It was recorded while the agent talked to a scripted engine over HTTP.  All
fields, types, headers and schemas are the agent's; longer texts are replaced.
"""

import json
from pathlib import Path

import httpx
import pytest

from tests.server.scripted import END, ids_of

RECORDINGS = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "agents").glob("*.json"))}
LEFT_OUT = {"codex": "web_search", "codex_schema": "web_search"}
KEEPS_REASONING = ("claude_code", "codex")
"""Agents that send their history with the reasoning; the others leave it out, or change the prompt between turns."""
WITH_SCHEMA = ("claude_code_title", "codex_schema")
"""Recordings whose first request asks for an answer that follows a schema."""


def bodies_of(recording):
    for turn in recording["turns"]:
        absent = turn.get("absent", ())
        common = {key: value for key, value in recording["common"].items() if key not in absent}
        yield common | {key: value for key, value in turn.items() if key != "absent"}


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def answer_of(path, body, text):
    """Reasoning, text and calls (name and arguments) of an answer, streamed or not, in any of the protocols."""
    reasoning, content, calls = "", "", {}
    if "/chat/" in path:
        choices = [event["choices"][0] for event in events_of(text)] if body["stream"] else json.loads(text)["choices"]
        for choice in choices:
            part = choice["delta"] if body["stream"] else choice["message"]
            reasoning += part.get("reasoning_content") or ""
            content += part.get("content") or ""
            for call in part.get("tool_calls") or ():
                known = calls.setdefault(call["index"], [call["function"].get("name"), ""])
                known[1] += call["function"].get("arguments") or ""
    elif "/responses" in path:
        for item in events_of(text)[-1]["response"]["output"]:
            match item["type"]:
                case "reasoning":
                    reasoning = item["content"][0]["text"]
                case "message":
                    content = item["content"][0]["text"]
                case "function_call":
                    calls[len(calls)] = [item["name"], item["arguments"]]
                case "custom_tool_call":
                    calls[len(calls)] = [item["name"], json.dumps({"input": item["input"]})]
    else:
        for event in events_of(text):
            block = event.get("content_block", {})
            if block.get("type") == "tool_use":
                calls[event["index"]] = [block["name"], ""]
            delta = event.get("delta", {})
            reasoning += delta.get("thinking", "")
            content += delta.get("text", "")
            if "partial_json" in delta:
                calls[event["index"]][1] += delta["partial_json"]
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def parts_of(script):
    """Reasoning and text of a script before its calls."""
    reasoning, _, rest = script.partition("</think>")
    return reasoning, rest.partition("\n\n<｜DSML｜ calls>")[0]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recorded_conversation_is_answered(server, name, chunk):
    recording = RECORDINGS[name]
    server.engine.say_in_turn(*recording["answers"])
    server.engine.chunk = chunk
    called = []
    for script, body in zip(recording["answers"], bodies_of(recording), strict=True):
        answer = httpx.post(server.url + recording["path"], json=body, headers=recording["headers"])
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-deepinfer-left-out") == LEFT_OUT.get(name)
        reasoning, content, calls = answer_of(recording["path"], body, answer.text)
        assert (reasoning, content) == parts_of(script)
        assert len(calls) == script.count("invoke name=")
        called += calls
    assert called or name in WITH_SCHEMA
    last = server.engine.asked[-1].prompt
    for tool, arguments in called:
        assert f'invoke name="{tool}"' in last
        assert all(str(value) in last for value in arguments.values())


@pytest.mark.parametrize("name", KEEPS_REASONING)
def test_the_next_turn_of_an_agent_begins_with_the_turn_before(server, name):
    """A prefix cache then computes only what is new."""
    recording = RECORDINGS[name]
    server.engine.say_in_turn(*recording["answers"])
    for body in bodies_of(recording):
        httpx.post(server.url + recording["path"], json=body, headers=recording["headers"])
    turns = server.engine.asked
    for before, script, after in zip(turns, recording["answers"], turns[1:], strict=False):
        begun = [*before.ids, *ids_of(script), END]
        assert after.ids[: len(begun)] == begun


@pytest.mark.parametrize("name", WITH_SCHEMA)
def test_the_schema_of_an_agent_becomes_a_grammar(server, name):
    recording = RECORDINGS[name]
    assert httpx.post(server.url + recording["path"], json=next(bodies_of(recording))).status_code == 200
    asked = server.engine.asked[-1]
    assert asked.params.structured_output.schema_type == ("json" if name == "claude_code_title" else "lark")
    assert "Response Format" in asked.prompt


def test_claude_codes_changing_line_changes_no_prompt(server):
    recording = RECORDINGS["claude_code"]
    body = next(bodies_of(recording))
    for number in ("00000", "41f3a"):
        changed = json.loads(json.dumps(body).replace("cch=00000", f"cch={number}"))
        assert httpx.post(server.url + recording["path"], json=changed, headers=recording["headers"]).status_code == 200
    first, second = server.engine.asked
    assert first.ids == second.ids
    assert "billing" not in first.prompt


def test_codex_gets_ordered_events_with_the_ids_of_the_end(server):
    recording = RECORDINGS["codex"]
    server.engine.say_in_turn(*recording["answers"])
    for body in bodies_of(recording):
        events = events_of(httpx.post(server.url + recording["path"], json=body, headers=recording["headers"]).text)
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        done = [each["item"]["id"] for each in events if each["type"] == "response.output_item.done"]
        assert done == [each["id"] for each in events[-1]["response"]["output"]]
