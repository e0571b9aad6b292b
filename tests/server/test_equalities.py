"""Equal seeds give equal tokens: streamed and whole, over each protocol, and from ``LLM.generate``, at temperature 1."""

import anthropic
import httpx
import numpy as np
import openai
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.server.serve import banned_token_ids
from deepinfer.tokenizer import EOS, byte_tokenizer

HI = [{"role": "user", "content": "hi"}]
TOKENIZER = byte_tokenizer()
DSML, THINK_END, END = (TOKENIZER.special(each) for each in ("｜DSML｜", "</think>", EOS))
SAMPLING = {"temperature": 1.0, "top_p": 1.0}
SEEDS = [1, *(pytest.param(each, marks=pytest.mark.slow) for each in range(2, 6))]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def llm():
    made = LLM(
        "random",
        device="cpu",
        max_model_len=512,
        max_num_seqs=4,
        num_drafts=2,
        banned_token_ids=banned_token_ids(TOKENIZER),
        decode_sequence=False,
    )
    yield made
    made.close()


@pytest.fixture
def client(program):
    with openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def records_of(llm, prompt, **params):
    """Pairs (token id, log-probability) of each answer of ``LLM.generate``."""
    params = SamplingParams(**SAMPLING | params)
    answers = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    return [(each.token_id, each.token_logprobs) for each in answers[0]]


def spelled(token_id):
    """A token as Completions spells it: a part of a character by its bytes."""
    data = TOKENIZER.token_bytes(token_id)
    return TOKENIZER.decode([token_id]) if data.isascii() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_completions_have_the_tokens_of_the_llm(client, llm, seed, temperature):
    prompt = [0, 70, 80, 90]
    ask = (
        {"model": "random", "prompt": prompt, "seed": seed, "max_tokens": NUM_TOKENS, "logprobs": 0}
        | SAMPLING
        | {"temperature": temperature}
    )
    whole = client.completions.create(**ask).choices[0]
    tokens, logprobs, text = [], [], ""
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            tokens += choice.logprobs.tokens
            logprobs += choice.logprobs.token_logprobs
            text += choice.text
    records = records_of(llm, prompt, seq_seed=seed, max_tokens=NUM_TOKENS, temperature=temperature)
    assert whole.logprobs.tokens == tokens == [spelled(token_id) for token_id, _ in records]
    assert whole.logprobs.token_logprobs == logprobs == [logprob for _, logprob in records]
    assert whole.text == text


@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("seed", SEEDS)
def test_chats_have_the_tokens_of_the_llm(client, program, llm, seed, effort):
    """Chat Completions writes log-probabilities in single precision, and none from an incomplete character at the end on."""
    chat = {"model": "random", "messages": HI, "reasoning_effort": effort}
    ask = chat | {"seed": seed, "max_tokens": NUM_TOKENS, "logprobs": True} | SAMPLING
    whole = client.chat.completions.create(**ask).choices[0].logprobs.to_dict()
    streamed = {"reasoning_content": [], "content": []}
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            for name, entries in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                streamed[name] += entries or ()
    found = [
        [(bytes(each["bytes"]), np.float32(each["logprob"])) for name in streamed for each in part.get(name) or ()]
        for part in (whole, streamed)
    ]
    prompt = httpx.post(f"{program.url}/tokenize", json=chat).json()["tokens"]
    records = records_of(llm, prompt, seq_seed=seed, max_tokens=NUM_TOKENS, banned_token_ids=[DSML])
    expected = [
        (TOKENIZER.token_bytes(token_id), np.float32(logprob))
        for token_id, logprob in records
        if token_id not in (THINK_END, END)
    ]
    whole, streamed = found
    assert len(whole) > NUM_TOKENS // 2
    assert whole == streamed == expected[: len(whole)]
    assert all(token[0] >= 0x80 for token, _ in expected[len(whole) :][:1])


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_of_responses_and_messages_equal_whole_answers(client, program, seed):
    extra = {"seed": seed, **SAMPLING}
    ask = {"model": "random", "input": "hi", "max_output_tokens": NUM_TOKENS, "extra_body": {"seed": seed}} | SAMPLING
    whole = client.responses.create(**ask)
    final = list(client.responses.create(**ask, stream=True))[-1].response
    assert texts_of(whole) == texts_of(final)
    assert whole.usage == final.usage
    with anthropic.Anthropic(base_url=program.url, api_key="none", max_retries=0) as messages:
        ask = {"model": "random", "messages": HI, "max_tokens": NUM_TOKENS, "extra_body": extra}
        message = messages.messages.create(**ask)
        with messages.messages.stream(**ask) as stream:
            last = stream.get_final_message()
    assert [each.to_dict() | {"signature": 0} for each in message.content] == [
        each.to_dict() | {"signature": 0} for each in last.content
    ]
    chat = client.chat.completions.create(model="random", messages=HI, max_tokens=NUM_TOKENS, **extra).choices[0].message
    assert message.content[0].thinking == chat.reasoning_content == whole.output[0].content[0].text


def texts_of(response):
    return [part.text for item in response.output for part in item.content]
