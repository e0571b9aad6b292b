"""Completions with the vendor's client, against replayed answers."""

import openai
import pytest

from deepinfer.request import RequestOutput
from deepinfer.server.completions import StopFinder
from tests.server.scripted import TOKENIZER, ids_of

ASK = {"model": "nano", "prompt": "ab"}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def texts_of(stream):
    texts = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["<｜begin▁of▁sentence｜>ab"]),
        (["a", "b"], ["<｜begin▁of▁sentence｜>a", "<｜begin▁of▁sentence｜>b"]),
        ([100, 101], ["ab"]),
        ([[100], [101]], ["a", "b"]),
    ],
)
def test_the_four_forms_of_a_prompt(client, server, prompt, expected):
    answer = client.completions.create(model="nano", prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert sorted(each.prompt for each in server.engine.asked) == expected
    assert answer.usage.prompt_tokens == sum(len(each.ids) for each in server.engine.asked)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_streamed_equals_whole(client, server, chunk):
    server.engine.say("naïve ☃", "second")
    server.engine.chunk = chunk
    whole = client.completions.create(**ASK, n=2, max_tokens=50)
    assert [choice.text for choice in whole.choices] == ["naïve ☃", "second"]
    stream = client.completions.create(**ASK, n=2, max_tokens=50, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert texts_of(chunks) == {0: "naïve ☃", 1: "second"}
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_stop_string_over_steps(client, server, chunk):
    server.engine.say("one st stop two")
    server.engine.chunk = chunk
    answer = client.completions.create(**ASK, stop=["stop", "tw"], max_tokens=50)
    assert answer.choices[0].text == "one st "
    assert answer.choices[0].finish_reason == "stop"
    assert texts_of(client.completions.create(**ASK, stop="stop", stream=True, max_tokens=50)) == {0: "one st "}


def test_echo_with_log_probabilities(client, server):
    server.engine.say("cd")
    answer = client.completions.create(model="nano", prompt=[0, 100, 101], echo=True, logprobs=2, max_tokens=1)
    assert server.engine.asked[-1].params.prompt_logprobs
    assert answer.choices[0].text == "<｜begin▁of▁sentence｜>abc"
    of_prompt = answer.choices[0].logprobs
    assert of_prompt.tokens == ["<｜begin▁of▁sentence｜>", "a", "b", "c"]
    assert of_prompt.token_logprobs == [None, -1, -2, -0.5]
    assert of_prompt.top_logprobs[:3] == [None, {"a": -1, "b": -2}, {"b": -2, "c": -3}]
    assert of_prompt.text_offset == [0, 21, 22, 23]
    scored = client.completions.create(**ASK, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (scored.text, scored.logprobs.top_logprobs) == ("ab", [{"a": -1}, {"b": -2}])
    unscored = client.completions.create(**ASK, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert (unscored.logprobs.token_logprobs, unscored.logprobs.top_logprobs) == ([-1, -2], [{}, {}])
    chosen = client.completions.create(**ASK, logprobs=0).choices[0].logprobs
    assert chosen.tokens == ["c", "d", "<｜end▁of▁sentence｜>"]
    assert chosen.top_logprobs == [{}, {}, {}]
    assert client.completions.create(**ASK).choices[0].logprobs is None
    bare = client.completions.create(**ASK, echo=True, max_tokens=0)
    assert bare.choices[0].text == "ab"
    assert bare.usage.completion_tokens == 0


def test_parts_of_a_character_are_spelled_by_their_bytes(client, server):
    server.engine.say("é")
    logprobs = client.completions.create(model="nano", prompt="ïb", echo=True, logprobs=1, max_tokens=9).choices[0].logprobs
    assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xaf", "b", "bytes:\\xc3", "bytes:\\xa9", "<｜end▁of▁sentence｜>"]
    assert logprobs.text_offset == [0, 0, 1, 2, 2, 3]
    assert logprobs.top_logprobs[1] == {"bytes:\\xaf": -2}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999]}, "token ids below"),
        ({"prompt": {"a": 1}}, "neither text nor ids"),
        ({"max_tokens": 0}, "echo=true"),
        ({"max_tokens": 20000}, "context limit of 16384"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
    ],
)
def test_what_cannot_be_served_is_named(client, fields, word):
    with pytest.raises(openai.BadRequestError, match=word):
        client.completions.create(**ASK | {key: value for key, value in fields.items() if key == "prompt"}, extra_body=fields)


def test_a_stop_finder_never_gives_a_part_of_a_stop_string_away():
    text = "aabaabab"
    for stops in (["aabab"], ["ab", "aab"], ["x"], ["ba", "abab"]):
        first = min((at for each in stops if (at := text.find(each)) >= 0), default=len(text))
        for size in (1, 2, 3, 8):
            finder, found = StopFinder(stops), ""
            for at in range(0, len(text), size):
                if not finder.is_found:
                    found += finder.push(text[at : at + size])
            assert found + finder.finish() == text[:first], (stops, size)
    assert TOKENIZER.decode([100]) == "a"


def test_a_prompt_whose_stop_string_came_needs_no_more_records(server):
    body = {"model": "nano", "prompt": [[5, 6], [7, 8]], "stop": "l"}
    writer = server.service.completions.read(body).writer
    for token_id in ids_of("hel"):
        writer.push(0, [record(token_id)])
    writer.push(1, [record(ids_of("h")[0])])
    assert writer.is_complete(0)
    assert not writer.is_complete(1)


def record(token_id):
    return RequestOutput(
        request_id="a", prompt_len=2, token_id=token_id, finished=False, finish_reason=None, num_output_tokens=1,
        max_num_batched_tokens=99,
    )  # fmt: skip
