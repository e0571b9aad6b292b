"""Chat Completions with the vendor's client, over HTTP, against replayed answers."""

import asyncio
import base64
import io
import json
import time

import httpx
import openai
import pytest
from PIL import Image
from pydantic import BaseModel

from deepinfer.request import FinishReason
from tests.server.scripted import call_of, calls_of

HI = [{"role": "user", "content": "hi"}]
ASK = {"model": "nano", "messages": HI}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def joined(stream):
    """Reasoning, content and finish reason of a stream, and its last usage."""
    reasoning = content = ""
    reason = usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return reasoning, content, reason, usage


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_streamed_equals_whole_for_any_split(client, server, chunk):
    server.engine.say("I think\n</think>\nThe answer is 42, naïve ☃ text.")
    server.engine.chunk = chunk
    whole = client.chat.completions.create(**ASK)
    message = whole.choices[0].message
    assert message.reasoning_content == "I think"
    assert message.content == "The answer is 42, naïve ☃ text."
    assert whole.choices[0].finish_reason == "stop"
    assert whole._request_id
    stream = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    reasoning, content, reason, usage = joined(stream)
    assert (reasoning, content, reason) == (message.reasoning_content, message.content, "stop")
    assert usage == whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert usage.completion_tokens_details.reasoning_tokens > 0


def test_the_async_client_reads_the_same(server):
    server.engine.say("a</think>b")

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(**ASK)
            stream = await client.chat.completions.create(**ASK, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(ask()) == ("b", "b")


def test_usage_counts_the_drafts_of_all_answers(client, server):
    server.engine.say("a</think>" + "x" * 20)
    server.engine.chunk, server.engine.drafts = 4, (5, 3)
    whole = client.chat.completions.create(**ASK).usage
    rounds = server.engine.num_steps - 1
    stream = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    details = whole.completion_tokens_details
    assert (details.verified_draft_tokens, details.accepted_draft_tokens) == (5 * rounds, 3 * rounds)
    assert joined(stream)[3] == whole


def test_a_stream_without_include_usage_has_no_usage(client):
    assert joined(client.chat.completions.create(**ASK, stream=True))[3] is None


def test_all_records_of_a_step_are_one_event(server):
    server.engine.say("</think>" + "x" * 30)
    server.engine.chunk = 11
    raw = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | {"stream": True}).text
    pieces = [json.loads(each[6:]) for each in raw.split("\n\n") if each.startswith("data: {")]
    contents = [each["choices"][0]["delta"].get("content") for each in pieces if each["choices"]]
    assert [each for each in contents if each] == ["x" * 10, "x" * 11, "x" * 9]
    assert raw.endswith("data: [DONE]\n\n")


def test_the_length_limit_is_reported(client, server):
    server.engine.say("</think>" + "x" * 100)
    for limit in ({"max_tokens": 10}, {"max_completion_tokens": 10}, {"max_completion_tokens": 10, "max_tokens": 50}):
        answer = client.chat.completions.create(**ASK, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 10


def test_a_stop_string_inside_a_step_cuts_the_text_and_the_usage(client, server):
    server.engine.say("now stop</think>one two stop three")
    server.engine.chunk = 50
    for stop in ("stop", ["never", "stop"]):
        answer = client.chat.completions.create(**ASK, stop=stop)
        assert answer.choices[0].message.reasoning_content == "now stop"
        assert answer.choices[0].message.content == "one two "
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len("now stop") + 1 + len("one two stop")


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_answers_have_their_own_texts(client, server, is_stream):
    server.engine.say("</think>one", "r</think>the second", "</think>3")
    answer = client.chat.completions.create(**ASK, n=3, stream=is_stream)
    if is_stream:
        texts = {}
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    else:
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert answer.usage.completion_tokens == 4 + 12 + 2
    assert texts == {0: "one", 1: "the second", 2: "3"}


def test_log_probabilities_of_the_answer(client, server):
    server.engine.say("ab</think>c☃")
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [each.bytes for each in content] == [[99], [0xE2], [0x98], [0x83]]
    assert [each.token for each in content[0].top_logprobs] == ["^", "_"]
    assert server.engine.asked[-1].params.top_logprobs == 2
    bare = client.chat.completions.create(**ASK, logprobs=True)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    assert client.chat.completions.create(**ASK).choices[0].logprobs is None


def test_sampling_fields_reach_the_engine_as_sent(client, server):
    client.chat.completions.create(
        **ASK, temperature=0.3, top_p=0.5, seed=-7, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"100": 3},
        extra_body={"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [5]},
    )  # fmt: skip
    params = server.engine.asked[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.5, -1, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert params.bias_pairs == ((100, 3.0),)
    assert params.seq_seed == 2**64 - 7
    assert (params.first_n_token_no_eos, params.stop_token_ids) == (2, (5,))
    client.chat.completions.create(**ASK)
    assert (server.engine.asked[-1].params.temperature, server.engine.asked[-1].params.top_p) == (1.0, 0.95)


def test_calls_stream_as_fragments_and_the_helper_joins_them(client, server):
    block = calls_of(call_of("get_weather", city='Pa"ris\n<x>', days=3), call_of("get_weather", city="Rome"))
    server.engine.say("Two calls.</think>Let me look." + block)
    expected = [{"city": 'Pa"ris\n<x>', "days": 3}, {"city": "Rome"}]
    whole = client.chat.completions.create(**ASK, tools=[WEATHER])
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert [json.loads(each.function.arguments) for each in message.tool_calls] == expected
    assert len({each.id for each in message.tool_calls}) == 2
    fragments = 0
    with client.chat.completions.stream(**ASK, tools=[WEATHER]) as stream:
        for event in stream:
            fragments += event.type == "tool_calls.function.arguments.delta"
        final = stream.get_final_completion()
    assert fragments > 4
    assert [json.loads(each.function.arguments) for each in final.choices[0].message.tool_calls] == expected


def test_results_of_calls_go_back_in_any_order(client, server):
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": name})}}
        for name in ("Paris", "Rome")
    ]
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "two cities"},
        {"role": "tool", "tool_call_id": "Rome", "content": "hot"},
        {"role": "tool", "tool_call_id": "Paris", "content": [{"type": "text", "text": "cold"}]},
    ]
    client.chat.completions.create(model="nano", messages=history, tools=[WEATHER])
    prompt = server.engine.asked[-1].prompt
    assert prompt.index("cold") < prompt.index("hot")
    assert "two cities</think>" in prompt
    renamed = [history[0], {**history[1], "reasoning_content": history[1]["reasoning"]}, *history[2:]]
    del renamed[1]["reasoning"]
    client.chat.completions.create(model="nano", messages=renamed, tools=[WEATHER])
    assert server.engine.asked[-1].prompt == prompt


def test_forced_calls_become_grammars_with_and_without_reasoning(client, server):
    server.engine.say("</think>" + calls_of(call_of("get_weather", city="Rome")))
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        args = server.engine.asked[-1].params.structured_output
        assert args.schema_type == "lark"
        assert "get_weather" in args.schema
        assert args.trigger_token_ids
        assert args.end_needs_trigger
    server.engine.say(call_of("get_weather", city="Rome") + "</｜DSML｜ calls>")
    answer = client.chat.completions.create(
        **ASK, tools=[WEATHER], tool_choice=named, extra_body={"thinking": {"type": "disabled"}}
    )
    asked = server.engine.asked[-1]
    assert asked.prompt.endswith("</think>\n\n<｜DSML｜ calls>\n")
    assert asked.params.structured_output.trigger_token_ids == ()
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_free_calls_have_no_grammar_and_strict_ones_do(client, server):
    client.chat.completions.create(**ASK, tools=[WEATHER])
    assert server.engine.asked[-1].params.structured_output is None
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    client.chat.completions.create(**ASK, tools=[strict])
    assert server.engine.asked[-1].params.structured_output.schema_type == "lark"
    client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice="none")
    assert server.engine.asked[-1].params.structured_output is None


def test_a_nested_model_keeps_its_definitions(client, server):
    class Street(BaseModel):
        name: str
        number: int

    class Place(BaseModel):
        streets: list[Street]

    server.engine.say('</think>{"streets": [{"name": "Rue", "number": 3}]}')
    answer = client.chat.completions.parse(**ASK, response_format=Place)
    assert answer.choices[0].message.parsed == Place(streets=[Street(name="Rue", number=3)])
    schema = json.loads(server.engine.asked[-1].params.structured_output.schema)
    assert schema["$defs"]["Street"]["additionalProperties"] is False
    assert "$defs" in server.engine.asked[-1].prompt


def test_other_formats(client, server):
    client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert json.loads(server.engine.asked[-1].params.structured_output.schema) == {"type": "object"}
    client.chat.completions.create(**ASK, extra_body={"response_format": {"type": "regex", "regex": "[ab]+"}})
    assert server.engine.asked[-1].params.structured_output.schema == "[ab]+"
    client.chat.completions.create(**ASK, response_format={"type": "text"})
    assert server.engine.asked[-1].params.structured_output is None


@pytest.mark.parametrize("extra", [{"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking_token_budget": 9}])
def test_a_budget_ends_the_reasoning(client, server, extra):
    client.chat.completions.create(**ASK, extra_body=extra)
    args = server.engine.asked[-1].params.structured_output
    assert args.max_free_tokens == 9
    client.chat.completions.create(**ASK, tools=[WEATHER], extra_body=extra)
    assert server.engine.asked[-1].params.structured_output.max_free_tokens == 9
    client.chat.completions.create(**ASK, extra_body={"thinking": {"type": "disabled"}})
    assert server.engine.asked[-1].params.structured_output is None


def test_effort_is_a_word_or_a_number(client, server):
    for effort, number in (("low", 50), ("high", 75), ("max", 100)):
        client.chat.completions.create(**ASK, reasoning_effort=effort)
        assert f"Reasoning Effort: {number} " in server.engine.asked[-1].prompt
    by_word = server.engine.asked[-1]
    client.chat.completions.create(**ASK, extra_body={"reasoning_effort": 100})
    assert server.engine.asked[-1].ids == by_word.ids
    client.chat.completions.create(**ASK, extra_body={"reasoning_effort": 33})
    assert "Reasoning Effort: 33 (range" in server.engine.asked[-1].prompt
    client.chat.completions.create(**ASK, reasoning_effort="none")
    assert server.engine.asked[-1].prompt.endswith("</think>")


def test_roles_prefix_and_lists_of_parts(client, server):
    client.chat.completions.create(
        model="nano",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Say"}]},
            {"role": "assistant", "content": "Once upon", "prefix": True},
        ],
    )
    prompt = server.engine.asked[-1].prompt
    assert "Be brief." in prompt
    assert prompt.endswith("Once upon")
    server.engine.say(" a time")
    answer = client.chat.completions.create(
        model="nano", messages=[*HI, {"role": "assistant", "content": "Once", "prefix": True}]
    )
    assert answer.choices[0].message.content == " a time"


def test_spelling_a_special_token_is_text(client, server):
    client.chat.completions.create(model="nano", messages=[{"role": "user", "content": "</think><｜User｜>"}])
    ids = server.engine.asked[-1].ids
    assert ids.count(ids[-1]) == 1  # only the template's <think>
    assert server.engine.asked[-1].params.banned_token_ids  # the mark of calls, because there are no tools


def picture(width=64, height=48):
    data = io.BytesIO()
    Image.new("RGB", (width, height), (9, 9, 200)).save(data, "PNG")
    return data.getvalue()


def with_image(url):
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]}]


def test_an_image_as_a_data_url_reaches_the_engine(client, server):
    file = picture()
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    client.chat.completions.create(model="nano", messages=with_image(url), max_tokens=3)
    assert server.engine.asked[-1].images == [file]
    assert server.engine.asked[-1].prompt.count("<｜deepseek_image｜>") == 1


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("data:image/png;base64,!!!", "base64"),
        ("data:image/png;base64,AAAA", "cannot be decoded"),
        ("http://127.0.0.1:1/x.png", "does not fetch"),
        ("file:///etc/passwd", "image"),
    ],
)
def test_unusable_images_are_refused(client, url, word):
    with pytest.raises(openai.BadRequestError, match=word):
        client.chat.completions.create(model="nano", messages=with_image(url))


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"temperature": 3e39}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "keeps no token"),
        ({"n": 129}, None, "n=129"),
        ({"top_k": "x"}, "top_k", "top_k='x'"),
        ({"max_tokens": 10**5}, None, "context limit of 16384"),
        ({"max_tokens": 0}, None, "max_tokens"),
        ({"stop": [""]}, None, "stop"),
        ({"stop": ["x"] * 17}, None, "at most 16"),
        ({"logit_bias": {"x": 1}}, None, "not a token id"),
        ({"logit_bias": {str(each): 1 for each in range(1001)}}, None, "limit is 1000"),
        ({"tools": [{**WEATHER, "function": {"name": "f", "description": "x" * (1 << 20)}}]}, "tools", "the limit is 1048576"),
        ({"stream_options": {"include_usage": True}}, None, "stream=true"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"audio": {"voice": "x"}}, "audio", "audio"),
        ({"functions": [{"name": "f"}]}, "functions", "functions"),
        ({"no_such_field": 1}, "no_such_field", "no_such_field"),
        ({"messages": "hi"}, "messages", "not a list"),
        ({"messages": []}, None, "messages"),
        ({"seed": "x"}, "seed", "seed"),
        ({"cache_salt": 3}, None, "cache_salt"),
    ],
)
def test_what_cannot_be_served_is_named(client, fields, param, word):
    with pytest.raises(openai.BadRequestError, match=word) as caught:
        client.chat.completions.create(**ASK, extra_body=fields)
    assert caught.value.param == param
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_neutral_values_of_refused_fields_are_accepted(client):
    client.chat.completions.create(
        **ASK, modalities=["text"], user="someone", metadata={"a": "b"}, store=False, service_tier="auto",
        extra_body={"functions": None, "audio": None},
    )  # fmt: skip


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=HI)
    assert client.chat.completions.create(model="other", messages=HI).model == "other"


def test_a_refused_schema_names_keyword_and_place(client):
    tool = {**WEATHER, "function": {**WEATHER["function"], "parameters": {"type": "object", "allOf": [{}]}}}
    with pytest.raises(openai.BadRequestError, match="get_weather have allOf"):
        client.chat.completions.create(**ASK, tools=[tool], tool_choice="required")


def test_a_failure_before_the_first_token_is_a_status_and_later_an_event(client, server):
    server.engine.fail_after = 0
    with pytest.raises(openai.InternalServerError, match="asked to fail"):
        client.chat.completions.create(**ASK, stream=True)
    server.engine.num_steps, server.engine.fail_after = 0, 1
    server.engine.say("</think>" + "x" * 40)
    with pytest.raises(openai.APIError, match="asked to fail"):
        joined(client.chat.completions.create(**ASK, stream=True))


def test_a_grammar_that_fails_is_the_requests_error(client, server):
    server.engine.say("x" * 9, reason=FinishReason.GRAMMAR_ERROR)
    with pytest.raises(openai.BadRequestError, match="the scripted grammar"):
        client.chat.completions.create(**ASK)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server, is_stream):
    server.engine.say("x" * 5000)
    server.engine.pause_s = 0.01
    with (
        httpx.Client() as client,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=ASK | {"stream": is_stream}, timeout=0.3)
        if is_stream
        else pytest.raises(httpx.ReadTimeout),
    ):
        if not is_stream:
            httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=0.3)
    deadline = time.monotonic() + 1
    while server.engine.open:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.engine.num_steps < 100


def test_closing_streams_a_hundred_times_leaves_nothing(server):
    server.engine.say("x" * 5000)
    server.engine.pause_s = 0.005
    with httpx.Client() as client:
        for number in range(100):
            with client.stream("POST", f"{server.url}/v1/chat/completions", json=ASK | {"stream": True}) as answer:
                if number % 2:
                    next(answer.iter_bytes())
