"""Plain tokens, whose events are made without recipe, against recipe itself."""

import dataclasses
import json
import random

import deepseek_recipe as recipe
import pytest

from deepinfer.config import named_config
from deepinfer.engine.builtin import NANO_DIRECTORY
from deepinfer.errors import RequestError
from deepinfer.request import FinishReason, RequestOutput
from deepinfer.server.chat import ChatReader, Encoder
from deepinfer.tokenizer import EOS, Tokenizer
from tests.server.scripted import ScriptedEngine

TOKENIZER = Tokenizer.from_dir(NANO_DIRECTORY)
ENCODER = Encoder(TOKENIZER, ["nano"])
READER = ChatReader(ENCODER, named_config("random"), ScriptedEngine().facts, ["nano"], None)
DSML, THINK_END = ENCODER.dsml_id, ENCODER.think_end_id
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]
CHAT = {"model": "nano", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


def writer(body, api="chat"):
    return READER.read(api, body).writer


def record(token_id, number, reason=None, sample_idx=0):
    return RequestOutput(
        request_id="a", prompt_len=9, token_id=token_id, finished=reason is not None, finish_reason=reason, sample_idx=sample_idx,
        num_output_tokens=number, max_num_batched_tokens=99, token_logprobs=-1.0,
    )  # fmt: skip


def events(data):
    return [json.loads(each.partition("data: ")[2]) for each in data.decode().split("\n\n") if each and "[DONE]" not in each]


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_recipe_gives_out_every_plain_token_at_once(thinking):
    """All 10,240 tokens of ``nano``: what is called plain is never held back or changed, in reasoning and in the answer."""
    body = CHAT | {"tools": TOOLS, "thinking": {"type": thinking}}
    converted = recipe.ChatCompletionRequest(json.dumps(body).encode()).convert(ENCODER.options)
    generator = recipe.ChatCompletionRequest.chunk_generator(converted, "id", "nano")
    processor = recipe.StreamProcessor(generator, converted.parsing_options, ENCODER.tokenizer)
    processor.push(recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)))
    processor.push(recipe.InferenceChunk.tokens(TOKENIZER.encode("a"), None))
    name = "reasoning_content" if thinking == "enabled" else "content"
    plain = [each for each in range(TOKENIZER.vocab_size) if ENCODER.plain[each]]
    assert len(plain) > 9000
    for token_id in plain:
        (event,) = processor.push(recipe.InferenceChunk.tokens([token_id], None))
        assert json.loads(event.to_json())["choices"][0]["delta"][name] == json.loads(f'"{ENCODER.plain[token_id]}"')


def random_ids(rng, count):
    """Mostly plain tokens, with newlines, parts of characters, "<", and calls between them."""
    ids = []
    while len(ids) < count:
        kind = rng.random()
        if kind < 0.8:
            ids += [rng.randrange(3, TOKENIZER.vocab_size) for _ in range(rng.randrange(1, 9))]
        elif kind < 0.97:
            ids += TOKENIZER.encode(rng.choice(["\n", "\n\n", "<", "é", "日本", "😀", ' "q" \\', "\t"]))
        else:
            ids += [THINK_END]
    return [each for each in ids if each not in TOKENIZER.special_ids or each == THINK_END]


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_streams_with_plain_tokens_equal_recipes_whole_answer(api):
    rng = random.Random(api)
    body = {"chat": CHAT, "messages": CHAT | {"max_tokens": 4000}}[api]
    for _ in range(60):
        ids = random_ids(rng, rng.randrange(1, 200))
        streamed, whole = writer(body, api), writer(body | {"stream": False}, api)
        made, at = b"", 0
        while at < len(ids):
            part = [record(each, at) for each in ids[at : at + rng.choice([1, 1, 1, 2, 5])]]
            made += streamed.push(0, part)
            whole.push(0, part)
            at += len(part)
        end = [record(TOKENIZER.special(EOS), at, FinishReason.STOP)]
        made += streamed.push(0, end) + streamed.finish()
        whole.push(0, end)
        expected, found = json.loads(whole.finish()), events(made)
        if api == "chat":
            message = expected["choices"][0]["message"]
            for name in ("content", "reasoning_content"):
                text = "".join(each["choices"][0]["delta"].get(name) or "" for each in found if each["choices"])
                assert text == (message.get(name) or "")
        else:
            for kind, name in (("text", "text"), ("thinking", "thinking")):
                text = "".join(each["delta"].get(name, "") for each in found if each["type"] == "content_block_delta")
                assert text == "".join(each[name] for each in expected["content"] if each["type"] == kind)
            assert found[-2]["usage"]["output_tokens"] == expected["usage"]["output_tokens"]


def counted(ids, api="chat", **fields):
    """Output tokens and tokens of reasoning that the usage reports."""
    body = {"chat": CHAT, "responses": {"model": "nano", "input": "hi"}}[api] | {"stream": False} | fields
    made = writer(body, api)
    for number, each in enumerate(ids):
        made.push(0, [record(each, number)])
    made.push(0, [record(TOKENIZER.special(EOS), len(ids), FinishReason.STOP)])
    usage = json.loads(made.finish())["usage"]
    name = "completion" if api == "chat" else "output"
    assert usage["total_tokens"] == usage[f"{name}_tokens"] + 9
    return usage[f"{name}_tokens"], usage[f"{name}_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_usage_counts_incomplete_characters_once(api):
    half, full = TOKENIZER.encode("日")[0], TOKENIZER.encode("a")[0]
    newline = TOKENIZER.encode("\n")[0]
    assert counted([half] * 3, api) == (3, 3)
    assert counted([half, full, half], api) == (3, 3)
    assert counted([newline] * 3, api) == (3, 3)
    assert counted([full, half, THINK_END, half, full], api) == (5, 2)
    assert counted([], api) == (0, 0)


def test_the_usage_counts_plain_tokens():
    made = writer(CHAT | {"stream_options": {"include_usage": True}})
    ids = TOKENIZER.encode("one two three") * 9
    data = b"".join(made.push(0, [record(each, number)]) for number, each in enumerate(ids))
    data += made.push(0, [record(THINK_END, 50)]) + made.push(0, [record(TOKENIZER.encode("x")[0], 51)])
    data += made.push(0, [record(TOKENIZER.special(EOS), 52, FinishReason.STOP)]) + made.finish()
    usage = events(data)[-1]["usage"]
    assert usage["completion_tokens"] == len(ids) + 2
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(ids)


def test_the_usage_counts_drafts():
    made = writer(CHAT | {"stream": False, "n": 2})
    ids = TOKENIZER.encode("one two")[:2]
    drafted = [dataclasses.replace(record(each, 1, sample_idx=at % 2), draft_tok=5, accept_tok=2) for at, each in enumerate(ids)]
    made.push(0, drafted)
    for sample_idx in range(2):
        made.push(0, [record(TOKENIZER.special(EOS), 2, FinishReason.STOP, sample_idx)])
    details = json.loads(made.finish())["usage"]["completion_tokens_details"]
    assert (details["verified_draft_tokens"], details["accepted_draft_tokens"]) == (10, 4)


def test_only_strict_tools_are_enforced_unless_a_call_is_forced():
    loose = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "minProperties": 3}}}
    strict = {"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}
    grammar = READER.read("chat", CHAT | {"tools": [strict, loose]}).params.structured_output.schema
    assert "any+" in grammar
    with pytest.raises(RequestError, match="minProperties"):
        READER.read("chat", CHAT | {"tools": [strict, loose], "tool_choice": "required"})
    with pytest.raises(RequestError, match="minProperties"):
        READER.read("chat", CHAT | {"tools": [loose | {"function": loose["function"] | {"strict": True}}]})
    assert READER.read("chat", CHAT | {"tools": [loose]}).params.so_args is None


def test_a_model_named_like_a_token_is_no_text():
    reader = ChatReader(Encoder(TOKENIZER, ["a"]), named_config("random"), ScriptedEngine().facts, ["a"], None)
    made = reader.read("chat", CHAT | {"model": "a", "thinking": {"type": "disabled"}}).writer
    ids = TOKENIZER.encode("\n\na") + TOKENIZER.encode("a") * 3
    data = b"".join(made.push(0, [record(each, number)]) for number, each in enumerate(ids))
    assert all(each["model"] == "a" for each in events(data))
    assert "".join(each["choices"][0]["delta"]["content"] for each in events(data)).count("a") == 4
