"""The vendors' clients use this server as they use the vendor's: helpers, retries, classes of errors, sync and async."""

import asyncio
import base64
import functools
import http.server
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anthropic
import deepseek_recipe as recipe
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.scripted import Server, call_of, calls_of
from tests.server.test_chat import WEATHER, picture, with_image
from tests.server.test_messages import FUNCTION, TOOL

HI = [{"role": "user", "content": "hi"}]
CALLS = "plan</think>I look." + calls_of(call_of("get_weather", city="Rome"), call_of("get_weather", city="Oslo"))


class Street(BaseModel):
    name: str
    number: int


class Place(BaseModel):
    town: str
    streets: list[Street]


PLACE = Place(town="Paris", streets=[Street(name="Rue", number=3), Street(name="Quai", number=1)])
PLACE_TEXT = "a plan</think>" + PLACE.model_dump_json()
CLIENTS = {
    "openai": (openai.OpenAI, openai.AsyncOpenAI, "/v1"),
    "anthropic": (anthropic.Anthropic, anthropic.AsyncAnthropic, ""),
}


@pytest.fixture
def chat(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


# Sync and async, whole and streamed.


def text_of_chat(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


ASKS = {
    "chat": ("openai", lambda c: c.chat.completions, {"messages": HI}, lambda a: a.choices[0].message.content, text_of_chat),
    "completions": (
        "openai",
        lambda c: c.completions,
        {"prompt": "hi", "max_tokens": 200},
        lambda a: a.choices[0].text,
        lambda events: "".join(choice.text for event in events for choice in event.choices),
    ),
    "responses": (
        "openai",
        lambda c: c.responses,
        {"input": "hi"},
        lambda a: a.output_text,
        lambda events: "".join(event.delta for event in events if event.type == "response.output_text.delta"),
    ),
    "messages": (
        "anthropic",
        lambda c: c.messages,
        {"messages": HI, "max_tokens": 200},
        lambda a: a.content[-1].text,
        lambda events: "".join(getattr(getattr(event, "delta", None), "text", "") for event in events),
    ),
}


@pytest.mark.parametrize("api", ASKS)
def test_sync_and_async_clients_read_the_same_whole_and_streamed(server, api):
    vendor, resource, ask, whole_text, stream_text = ASKS[api]
    sync, asynchronous, path = CLIENTS[vendor]
    text = "naïve ☃ text" if api == "completions" else "plan</think>naïve ☃ text"
    server.engine.say(text)
    make = {"base_url": server.url + path, "api_key": "none", "max_retries": 0}
    with sync(**make) as client:
        create = functools.partial(resource(client).create, model="nano", **ask)
        found = {whole_text(create()), stream_text(list(create(stream=True)))}

    async def read():
        async with asynchronous(**make) as client:
            create = functools.partial(resource(client).create, model="nano", **ask)
            models = [each.id async for each in client.models.list()]
            return whole_text(await create()), stream_text([each async for each in await create(stream=True)]), models

    whole, streamed, models = asyncio.run(read())
    assert found | {whole, streamed} == {"naïve ☃ text"}
    assert models == ["nano", "other"]


# Helpers.


@pytest.mark.parametrize("chunk", [1, 1000])
def test_chat_helpers_parse_nested_models_and_calls(chat, server, chunk):
    server.engine.chunk = chunk
    server.engine.say(PLACE_TEXT)
    assert chat.chat.completions.parse(model="nano", messages=HI, response_format=Place).choices[0].message.parsed == PLACE
    with chat.chat.completions.stream(model="nano", messages=HI, response_format=Place) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.parsed == PLACE
    assert kinds[-1] == "content.done"
    assert "$defs" in json.loads(server.engine.asked[-1].params.structured_output.schema)
    server.engine.say("plan</think>" + calls_of(call_of("Street", name="Rue", number=3)))
    tool = openai.pydantic_function_tool(Street)
    whole = chat.chat.completions.parse(model="nano", messages=HI, tools=[tool])
    assert whole.choices[0].message.tool_calls[0].function.parsed_arguments == Street(name="Rue", number=3)
    with chat.chat.completions.stream(model="nano", messages=HI, tools=[tool]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [Street(name="Rue", number=3)]


@pytest.mark.parametrize("chunk", [1, 1000])
def test_responses_helpers_parse_nested_models_and_calls(chat, server, chunk):
    server.engine.chunk = chunk
    server.engine.say(PLACE_TEXT)
    assert chat.responses.parse(model="nano", input="hi", text_format=Place).output_parsed == PLACE
    with chat.responses.stream(model="nano", input="hi", text_format=Place) as stream:
        numbers = [event.sequence_number for event in stream if hasattr(event, "sequence_number")]
        assert stream.get_final_response().output_parsed == PLACE
    assert numbers == sorted(set(numbers))
    server.engine.say("plan</think>" + calls_of(call_of("Street", name="Rue", number=3)))
    tool = openai.pydantic_function_tool(Street)["function"] | {"type": "function"}
    called = chat.responses.parse(model="nano", input="hi", tools=[tool])
    assert called.output[-1].parsed_arguments == {"name": "Rue", "number": 3}


def test_the_helpers_of_the_async_clients(server):
    server.engine.say(PLACE_TEXT)

    async def read():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            chat = await client.chat.completions.parse(model="nano", messages=HI, response_format=Place)
            async with client.chat.completions.stream(model="nano", messages=HI, response_format=Place) as stream:
                streamed = await stream.get_final_completion()
            response = await client.responses.parse(model="nano", input="hi", text_format=Place)
            async with client.responses.stream(model="nano", input="hi", text_format=Place) as stream:
                last = await stream.get_final_response()
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            message = await client.messages.parse(model="nano", max_tokens=500, messages=HI, output_format=Place)
            async with client.messages.stream(model="nano", max_tokens=500, messages=HI, output_format=Place) as stream:
                final = await stream.get_final_message()
        return [
            chat.choices[0].message.parsed, streamed.choices[0].message.parsed, response.output_parsed, last.output_parsed,
            message.parsed_output, final.parsed_output,
        ]  # fmt: skip

    assert asyncio.run(read()) == [PLACE] * 6


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_tool_runner_calls_functions_until_the_answer(claude, server, is_stream):
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        cities.append(city)
        return "sunny"

    server.engine.say_in_turn(CALLS, "done</think>It is sunny.")
    runner = claude.beta.messages.tool_runner(
        model="nano", max_tokens=2000, messages=HI, tools=[get_weather], stream=is_stream
    )  # fmt: skip
    messages = [each.get_final_message() if is_stream else each for each in runner]
    assert [each.stop_reason for each in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[-1].text == "It is sunny."
    assert cities == ["Rome", "Oslo"]
    assert server.engine.asked[-1].prompt.count("<tool_result>sunny</tool_result>") == 2


def test_the_async_tool_runner(server):
    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather of a city."""
        return city.upper()

    async def run():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            runner = client.beta.messages.tool_runner(model="nano", max_tokens=2000, messages=HI, tools=[get_weather])
            return await runner.until_done()

    server.engine.say_in_turn(CALLS, "done</think>It is sunny.")
    assert asyncio.run(run()).content[-1].text == "It is sunny."
    assert "ROME" in server.engine.asked[-1].prompt


def test_message_streams_give_text_and_parsed_input(claude, server):
    server.engine.say("plan</think>one two")
    with claude.messages.stream(model="nano", max_tokens=500, messages=HI) as stream:
        assert "".join(stream.text_stream) == "one two"
        assert stream.get_final_text() == "one two"
    server.engine.say(CALLS)
    with claude.messages.stream(model="nano", max_tokens=2000, messages=HI, tools=[TOOL]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        inputs = [block.input for block in stream.get_final_message().content if block.type == "tool_use"]
    assert inputs == [{"city": "Rome"}, {"city": "Oslo"}]
    assert snapshots[-1] == {"city": "Oslo"}
    assert claude.messages.parse(model="nano", max_tokens=500, messages=HI).parsed_output is None


# Log-probabilities, formats, names, images.


@pytest.mark.parametrize("top", [0, 5, 20])
def test_log_probabilities_stream_as_they_are_whole_reasoning_included(chat, server, top):
    server.engine.say("ab</think>c☃")
    ask = {"model": "nano", "messages": HI, "logprobs": True, "top_logprobs": top}
    whole = chat.chat.completions.create(**ask).choices[0].logprobs.to_dict()
    streamed = {"content": [], "reasoning_content": []}
    for chunk in chat.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            for name, entries in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                streamed.setdefault(name, []).extend(entries or ())
    assert [each["token"] for each in whole["reasoning_content"]] == ["a", "b"]
    assert len(whole["content"]) == 4
    for name, entries in streamed.items():
        assert entries == (whole.get(name) or [])
        assert {len(each["top_logprobs"]) for each in entries} <= {top}


def test_calls_carry_no_log_probabilities(chat, server):
    server.engine.say("</think>" + calls_of(call_of("get_weather", city="Rome")))
    answer = chat.chat.completions.create(model="nano", messages=HI, tools=[WEATHER], logprobs=True)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not (answer.choices[0].logprobs and answer.choices[0].logprobs.content)


def test_a_format_and_tools_together_allow_either(chat, server):
    form = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": Street.model_json_schema()}}
    for text in ('</think>{"name": "Rue", "number": 3}', CALLS):
        server.engine.say(text)
        answer = chat.chat.completions.create(model="nano", messages=HI, tools=[WEATHER], response_format=form)
        assert server.engine.asked[-1].params.structured_output.schema_type == "lark"
        assert bool(answer.choices[0].message.tool_calls) is (text == CALLS)


@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_tool_in_a_namespace_is_called_by_its_two_names(chat, server, effort):
    team = {"type": "namespace", "name": "team", "description": "A team.", "tools": [FUNCTION]}
    call = call_of("team::get_weather", city="Rome")
    server.engine.say((call + "</｜DSML｜ calls>") if effort == "none" else "a</think>" + calls_of(call))
    named = {"type": "function", "name": "get_weather", "namespace": "team"}
    ask = {"model": "nano", "input": "hi", "tools": [team], "reasoning": {"effort": effort}}
    item = chat.responses.create(**ask, tool_choice=named).output[-1]
    assert (item.name, item.namespace, json.loads(item.arguments)) == ("get_weather", "team", {"city": "Rome"})
    assert "team::get_weather" in server.engine.asked[-1].params.structured_output.schema
    for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        chat.responses.create(**ask, **fields)
        assert server.engine.asked[-1].params.structured_output is not None


def test_a_custom_tool_gets_its_input_as_text(chat, server):
    patch = "*** Begin Patch\n*** End Patch\n"
    server.engine.say("a</think>" + calls_of(call_of("apply_patch", input=patch)))
    tools = [{"type": "custom", "name": "apply_patch", "description": "Change files."}]
    stream = list(chat.responses.create(model="nano", input="hi", tools=tools, stream=True))
    pieces = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == patch
    assert stream[-1].response.output[-1].input == patch


def test_an_assistants_last_message_is_closed_unless_it_is_a_prefix(claude, chat, server):
    """Messages has no continuation here: the last assistant message is a turn of its own."""
    begun = [*HI, {"role": "assistant", "content": "Once"}]
    claude.messages.create(model="nano", max_tokens=50, messages=begun)
    assert server.engine.asked[-1].prompt.endswith("Once<｜end▁of▁sentence｜><｜Assistant｜><think>")
    chat.chat.completions.create(model="nano", messages=[HI[0], begun[1] | {"prefix": True}])
    assert server.engine.asked[-1].prompt.endswith("Once")


class _Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(picture())

    def log_message(self, *_):
        pass


def test_an_image_url_is_fetched_if_the_server_may(server):
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    fetcher = recipe.ReqwestImageFetcher().with_destination_filter(lambda _host, _address: True)
    made = Server(fetch=fetcher.fetch)
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(model="nano", messages=with_image(f"http://127.0.0.1:{site.server_port}/a.png"))
        assert made.engine.asked[-1].images == [picture()]
    made.close()
    site.shutdown()
    site.server_close()


def test_images_are_limited_in_number(chat):
    url = "data:image/png;base64," + base64.b64encode(picture(1, 1)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}] * 601
    with pytest.raises(openai.BadRequestError, match=r"601 images, the limit is 600"):
        chat.chat.completions.create(model="nano", messages=[{"role": "user", "content": content}])


# Errors and retries.


@pytest.fixture(scope="module")
def strict():
    made = Server(api_keys=("key",), max_body_bytes=50_000, max_waiting=1)
    yield made
    made.close()


class _Calls:
    """The same generation with each vendor's client."""

    def __init__(self, vendor, url, **settings):
        sync, _, path = CLIENTS[vendor]
        self.errors = openai if vendor == "openai" else anthropic
        self.client = sync(base_url=url + path, **{"api_key": "key", "max_retries": 0} | settings)

    def __call__(self, messages=HI, **fields):
        if self.errors is openai:
            return self.client.chat.completions.create(**{"model": "nano", "messages": messages} | fields)
        return self.client.messages.create(**{"model": "nano", "messages": messages, "max_tokens": 50} | fields)


@pytest.mark.parametrize("vendor", CLIENTS)
def test_each_status_is_the_clients_class_of_error(strict, vendor):
    engine, gate = strict.engine, strict.service.gate
    engine.reset()
    ask = _Calls(vendor, strict.url)
    errors = ask.errors
    with pytest.raises(errors.AuthenticationError, match="API key is wrong"):
        _Calls(vendor, strict.url, api_key="other")()
    with pytest.raises(errors.BadRequestError, match="temperature"):
        ask(extra_body={"temperature": -1})
    with pytest.raises(errors.NotFoundError, match="gpt"):
        ask(model="gpt")
    with pytest.raises(errors.APIStatusError, match="more than 50000 bytes") as large:
        ask([{"role": "user", "content": "x" * 60_000}])
    with pytest.raises(errors.APIStatusError, match="text/plain") as typed:
        ask(extra_headers={"content-type": "text/plain"})
    engine.first_pause_s = 0.5
    with pytest.raises(errors.APIStatusError, match="deadline") as late:
        ask(extra_headers={"x-deadline-ms": "50"})
    engine.first_pause_s, engine.fail_after = 0, 0
    with pytest.raises(errors.InternalServerError, match="asked to fail"):
        ask()
    gate.is_draining = True
    with pytest.raises(errors.APIStatusError, match="shuts down") as away:
        ask()
    gate.is_draining = False
    assert [each.value.status_code for each in (large, typed, late, away)] == [413, 415, 408, 503]
    if vendor == "anthropic":
        kinds = [each.value.body["error"]["type"] for each in (large, typed, late, away)]
        assert kinds == ["request_too_large", "invalid_request_error", "timeout_error", "overloaded_error"]


def test_a_full_queue_is_tried_again_after_the_time_that_the_server_says(strict):
    strict.engine.reset()
    strict.engine.first_pause_s = 1.0

    def patient(vendor):
        begin = time.monotonic()
        answer = _Calls(vendor, strict.url, max_retries=3)()
        return answer.model, time.monotonic() - begin

    with ThreadPoolExecutor(len(CLIENTS) + 1) as threads:
        first = threads.submit(_Calls("openai", strict.url))
        while not strict.engine.open:
            time.sleep(0.01)
        waits_s = []
        for vendor in CLIENTS:
            ask = _Calls(vendor, strict.url)
            with pytest.raises(ask.errors.RateLimitError) as refused:
                ask()
            waits_s.append(float(refused.value.response.headers["retry-after"]))
        strict.engine.first_pause_s = 0  # the requests that are tried again take no time
        done = list(threads.map(patient, CLIENTS))
        first.result()
    assert [model for model, _ in done] == ["nano", "nano"]
    assert all(took_s >= wait_s for (_, took_s), wait_s in zip(done, waits_s, strict=True))
    assert len(strict.engine.asked) == 3


@pytest.mark.parametrize("vendor", CLIENTS)
def test_what_must_fail_again_is_not_tried_again(strict, vendor):
    strict.engine.reset()
    strict.engine.fail_after = 0
    ask = _Calls(vendor, strict.url, max_retries=5)
    with pytest.raises(ask.errors.InternalServerError):
        ask()
    assert len(strict.engine.asked) == 1


def test_both_clients_keys_open_the_door(strict):
    strict.engine.reset()
    for vendor in CLIENTS:
        assert _Calls(vendor, strict.url)().model == "nano"
    with anthropic.Anthropic(base_url=strict.url, auth_token="key", api_key=None) as client:
        assert client.messages.create(model="nano", max_tokens=9, messages=HI).model == "nano"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_leaving_a_whole_answer_a_hundred_times_leaves_nothing(server, path):
    server.engine.say("x" * 5000)
    server.engine.pause_s = 0.01
    body = {"model": "nano", "max_tokens": 4000} | ({"messages": HI} if "responses" not in path else {"input": "hi"})
    if "responses" in path:
        body["max_output_tokens"] = body.pop("max_tokens")

    async def leave():
        async with httpx.AsyncClient() as client:
            tasks = [asyncio.ensure_future(client.post(server.url + path, json=body)) for _ in range(100)]
            await asyncio.sleep(0.5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    assert server.engine.asked
