"""Messages with Anthropic's client, and Responses with OpenAI's, against replayed answers."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.scripted import call_of, calls_of

ASK = {"model": "nano", "max_tokens": 4000, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": TOOL["input_schema"]}
CALLS = "plan</think>I look." + calls_of(call_of("get_weather", city="Rome"))


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def responses(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made.responses


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_messages_streamed_equals_whole(client, server, chunk):
    server.engine.say(CALLS)
    server.engine.chunk = chunk
    whole = client.messages.create(**ASK, tools=[TOOL])
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].thinking == "plan"
    assert whole.content[0].signature
    assert whole.content[2].input == {"city": "Rome"}
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_message()
    start = next(event for event in events if event.type == "message_start")
    assert start.message.usage.input_tokens == whole.usage.input_tokens > 0
    assert start.message.usage.cache_read_input_tokens == 4
    assert [block.to_dict() | {"id": 0, "signature": 0} for block in final.content] == [
        block.to_dict() | {"id": 0, "signature": 0} for block in whole.content
    ]


def test_the_async_client_and_the_path_below_anthropic(server):
    server.engine.say("</think>b")

    async def ask():
        async with anthropic.AsyncAnthropic(base_url=f"{server.url}/anthropic", api_key="none", max_retries=0) as client:
            return await client.messages.create(**ASK)

    assert asyncio.run(ask()).content[-1].text == "b"


def test_counted_tokens_are_those_of_the_call(client):
    kept = {"system": "You are brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(model="nano", messages=ASK["messages"], **kept)
    usage = client.messages.create(**ASK, **kept).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_choices_of_tools(client, server):
    server.engine.say(CALLS)
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        client.messages.create(**ASK, tools=[TOOL | {"type": "custom"}], tool_choice=choice)
        assert server.engine.asked[-1].params.structured_output.schema_type == "lark"
    client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "auto"})
    assert server.engine.asked[-1].params.structured_output is None


def test_a_large_max_tokens_is_lowered_to_the_context(client, server):
    client.messages.create(**ASK | {"max_tokens": 64000}, timeout=60)
    asked = server.engine.asked[-1]
    assert len(asked.ids) + asked.params.max_tokens == 16384


def test_formats_budgets_and_stops(client, server):
    class Answer(BaseModel):
        text: str

    server.engine.say('</think>{"text": "x"}')
    assert client.messages.parse(**ASK, output_format=Answer).parsed_output == Answer(text="x")
    assert "Response Format" in server.engine.asked[-1].prompt
    client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert server.engine.asked[-1].params.structured_output.max_free_tokens == 1024
    server.engine.say("</think>one stop two")
    stopped = client.messages.create(**ASK, stop_sequences=["stop"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "stop")


def test_errors_have_the_protocols_shape(client, server):
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**ASK | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers") as caught:
        client.messages.create(**ASK, extra_body={"mcp_servers": [{"url": "x"}]})
    assert caught.value.body["type"] == "error"
    assert caught.value.request_id == caught.value.body["request_id"]
    server.engine.say("x" * 40)
    server.engine.fail_after = 1
    with pytest.raises(anthropic.APIStatusError, match="asked to fail"), client.messages.stream(**ASK) as stream:
        list(stream)


def test_models_are_listed_for_both_clients(client, server):
    assert [each.id for each in client.models.list()] == ["nano", "other"]
    assert client.models.retrieve("nano").display_name == "nano"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("x")
    with openai.OpenAI(base_url=server.url, api_key="none") as plain:
        assert [each.id for each in plain.models.list()] == ["nano", "other"]
        assert plain.models.retrieve("nano").max_model_len == 16384


CLAUDE_CODE = {
    "model": "nano",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0; cch=41f3a;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "list files", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I run ls.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False}],
        },
    ],
    "tools": [
        {"name": "Bash", "description": "Run", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
}


def test_claude_code_as_it_is(server):
    server.engine.say("done</think>One file.")

    def ask(billing):
        body = json.loads(json.dumps(CLAUDE_CODE).replace("41f3a", billing))
        return httpx.post(f"{server.url}/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})

    answers = [ask("41f3a"), ask("99999")]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-deepinfer-left-out"] == "web_search_20250305"
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert "".join(each.get("delta", {}).get("text", "") for each in events) == "One file."
    first, second = server.engine.asked[-2:]
    assert first.ids == second.ids
    assert "billing" not in first.prompt
    assert "I run ls." in first.prompt


CODEX = {
    "model": "nano",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ls"}]},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "strict": False,
            "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "local_shell"},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
}  # fmt: skip


def test_codex_as_it_is(server):
    server.engine.say("look</think>" + calls_of(call_of("shell", command='["ls"]')))
    answer = httpx.post(f"{server.url}/v1/responses", json=CODEX)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-deepinfer-left-out"] == "local_shell, web_search"
    events = [json.loads(each.partition("data: ")[2]) for each in answer.text.split("\n\n") if "data: " in each]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert [each["id"] for each in done] == [each["id"] for each in final["output"]]
    assert final["parallel_tool_calls"] is False
    assert "Sandbox." in server.engine.asked[-1].prompt


@pytest.mark.parametrize("chunk", [1, 1000])
def test_responses_streamed_equals_whole(responses, server, chunk):
    server.engine.say("plan</think>The answer.")
    server.engine.chunk = chunk
    whole = responses.create(model="nano", input="hi", metadata={"a": "b"})
    assert whole.output_text == "The answer."
    assert whole.metadata == {"a": "b"}
    assert whole.status == "completed"
    with responses.stream(model="nano", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    assert final.output_text == "The answer."
    assert final.usage == whole.usage
    counted = responses.input_tokens.count(model="nano", input="hi")
    assert counted.input_tokens == whole.usage.input_tokens


def test_responses_formats_tools_and_limits(responses, server):
    class Answer(BaseModel):
        text: str

    server.engine.say('</think>{"text": "x"}')
    assert responses.parse(model="nano", input="hi", text_format=Answer).output_parsed == Answer(text="x")
    server.engine.say(CALLS)
    called = responses.create(model="nano", input="hi", tools=[FUNCTION], tool_choice="required")
    assert server.engine.asked[-1].params.structured_output.schema_type == "lark"
    assert json.loads(called.output[-1].arguments) == {"city": "Rome"}
    cut = responses.create(model="nano", input="hi", max_output_tokens=5)
    assert cut.status == "incomplete"
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"input": [{"type": "item_reference", "id": "x"}]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(fields)) if "input" not in fields else "item_reference"):
            responses.create(**{"model": "nano", "input": "hi"} | fields)


def test_a_failed_response_ends_with_an_event(responses, server):
    server.engine.say("</think>" + "x" * 40)
    server.engine.fail_after = 2
    events = list(responses.create(model="nano", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert "asked to fail" in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))
