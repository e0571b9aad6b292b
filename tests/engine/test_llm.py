"""The offline API on nano: its results, and that a caller's mistakes affect nothing else."""

import contextlib
import io
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, ContextTooLong, RequestError, StepFailed
from deepinfer.kv.cache import KVCache
from deepinfer.model.inputs import StepInputs
from deepinfer.request import FinishReason, Request
from deepinfer.step import Chunk, StepPlan
from deepinfer.tokenizer import IMAGE

PROMPTS = ["The engine", "x", "A longer prompt that is cut into chunks when the token budget of a step is small. " * 3]


@pytest.fixture(scope="module")
def llm():
    return LLM("random", device="cpu", progress=False, max_num_seqs=4, max_model_len=512)


def greedy(**given):
    return SamplingParams(temperature=0, **{"max_tokens": 6, "ignore_eos": True, **given})


def token_ids(llm, prompts, params, **given):
    records = llm.generate_records(prompts, params, use_tqdm=False, **given)
    return [[each.token_id for each in one] for one in records]


def assert_everything_returned(llm):
    scheduler = llm._core.scheduler
    scheduler.check()
    assert scheduler.is_idle
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_pages, stats.num_held_slots) == (0, 0, 0, 0)
    executor = llm._core.executor
    assert not executor.call(lambda: executor.worker._unfinished)
    assert not llm._boxes


def test_results_come_in_the_order_of_prompts_and_match_each_alone(llm):
    params = [greedy(max_tokens=count) for count in (9, 3, 5)]
    together = token_ids(llm, PROMPTS, params)
    assert [len(each) for each in together] == [9, 3, 5]
    assert together == [token_ids(llm, [prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert_everything_returned(llm)


def test_more_requests_than_slots_all_end(llm):
    results = token_ids(llm, PROMPTS * 4, greedy())
    assert results == token_ids(llm, PROMPTS, greedy()) * 4


def test_small_step_budget_changes_nothing(llm):
    small = LLM(
        "random", device="cpu", progress=False, max_num_seqs=2, max_model_len=512, max_num_batched_tokens=7, tokens_per_block=16
    )
    params = SamplingParams(seq_seed=5, max_tokens=8, ignore_eos=True, top_k=40, top_p=0.9)
    assert token_ids(small, PROMPTS, params) == token_ids(llm, PROMPTS, params)


def test_same_seed_repeats_and_other_seeds_differ(llm):
    first = token_ids(llm, ["seed"], SamplingParams(seq_seed=1, max_tokens=24, ignore_eos=True))
    assert first == token_ids(llm, ["seed"], SamplingParams(seq_seed=1, max_tokens=24, ignore_eos=True))
    assert first != token_ids(llm, ["seed"], SamplingParams(seq_seed=2, max_tokens=24, ignore_eos=True))


def test_texts_are_what_the_tokens_spell(llm):
    (text,) = llm.generate("spell", greedy(), use_tqdm=False)
    (records,) = llm.generate_records("spell", greedy(), use_tqdm=False)
    assert text == llm.get_tokenizer().decode([each.token_id for each in records])


def test_prompt_ids_equal_the_prompt_they_came_from(llm):
    ids = llm.prompt_ids(PROMPTS[0])
    assert token_ids(llm, None, greedy(), prompt_token_ids=[ids]) == token_ids(llm, PROMPTS[:1], greedy())


def test_top_logprobs_start_with_the_greedy_token(llm):
    (records,) = llm.generate_records("x", greedy(top_logprobs=3), use_tqdm=False)
    for each in records:
        assert each.top_token_ids[0] == each.token_id
        assert each.top_logprobs[0] == pytest.approx(each.token_logprobs)
        assert list(each.top_logprobs) == sorted(each.top_logprobs, reverse=True)


def network_logprobs(llm, ids):
    """[num_tokens - 1, vocab] log-probabilities after each token of a prompt but the last, from one pass of the network."""
    worker = llm._core.executor.worker
    num_pages = worker.layout.pages_for(len(ids))
    chunk = Chunk(
        request_id="all",
        slot=1,
        start=0,
        token_ids=np.array(ids, np.int32),
        page_ids=np.arange(1, num_pages + 1, dtype=np.int32),
        num_logits=len(ids),
    )

    def run():
        device = worker.model.device
        cache = KVCache(worker.layout, num_pages=num_pages + 1, num_slots=2, device=device)
        inputs = StepInputs.build(StepPlan(chunks=(chunk,)), config=worker.config, layout=worker.layout, device=device)
        with torch.inference_mode():
            logits = worker.model.forward(inputs, cache)
        return torch.log_softmax(logits.double(), dim=-1)[:-1]

    return llm._core.executor.call(run)


def network_prompt_logprobs(llm, ids):
    """Log-probabilities of all tokens of a prompt except the first."""
    return network_logprobs(llm, ids)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def test_prompt_logprobs_are_the_networks_however_the_prompt_is_computed(llm):
    short, long = [0, 5, 6, 7, 99, 5], [0, *range(20, 220)]
    params = greedy(max_tokens=2, prompt_logprobs=True)

    def first_and_rest(each, ids, count=1, **given):
        each.decode_sequence = False
        answers = each.generate(prompt_token_ids=[ids], sampling_params=greedy(max_tokens=2, **given), use_tqdm=False)
        each.decode_sequence = True
        assert len(answers) == count
        return answers[0][0].prompt_logprobs, [record.prompt_logprobs for one in answers for record in one][1:]

    got, rest = first_and_rest(llm, short, prompt_logprobs=True, n=2, count=2)
    assert rest == [None] * 3, "the first answer's first record alone reports on the prompt"
    assert got[0] is None
    assert got[1:] == pytest.approx(network_prompt_logprobs(llm, short), abs=1e-5)
    cold, _ = first_and_rest(llm, long, prompt_logprobs=True)
    assert cold[1:] == pytest.approx(network_prompt_logprobs(llm, long), abs=1e-5)
    assert len(cold) == len(long)
    assert first_and_rest(llm, long) == (None, [None])
    warm, _ = first_and_rest(llm, long, prompt_logprobs=True)
    assert warm == cold, "the cache holds keys, not log-probabilities"
    small = LLM("random", device="cpu", progress=False, max_num_seqs=2, max_model_len=256, max_num_batched_tokens=48)
    assert small.generate_records(prompt_token_ids=[long], sampling_params=params, use_tqdm=False)[0][0].prompt_logprobs == cold
    small.close()


def test_the_most_likely_tokens_of_a_prompt_are_the_networks_however_the_prompt_is_computed(llm):
    ids = [0, *range(20, 220)]
    expected = network_logprobs(llm, ids).sort(dim=-1, descending=True, stable=True)
    options = {"max_model_len": 256, "max_num_batched_tokens": 48, "tokens_per_block": 16}
    small = LLM("random", device="cpu", progress=False, max_num_seqs=2, **options)
    found = []
    for engine, num_top in ((llm, 3), (llm, 3), (small, 3), (llm, 1)):
        params = greedy(max_tokens=1, prompt_logprobs=True, top_logprobs=num_top)
        (records,) = engine.generate_records(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False)
        found.append((records[0].prompt_top_token_ids, records[0].prompt_top_logprobs))
        assert found[-1][0][0] == found[-1][1][0] == ()
        assert np.array(found[-1][0][1:]).tolist() == expected.indices[:, :num_top].tolist()
        np.testing.assert_allclose(found[-1][1][1:], expected.values[:, :num_top], atol=1e-5)
    small.close()
    assert found[0] == found[1] == found[2]
    plain = llm.generate_records(prompt_token_ids=[ids], sampling_params=greedy(prompt_logprobs=True), use_tqdm=False)[0][0]
    assert plain.prompt_top_token_ids is plain.prompt_top_logprobs is None


def test_end_token_stops_unless_ignored_or_held_back(llm):
    (records,) = llm.generate_records("x", greedy(max_tokens=1, top_logprobs=0), use_tqdm=False)
    limits = llm._core.scheduler.limits
    original = limits.eos_token_id
    object.__setattr__(limits, "eos_token_id", records[0].token_id)
    try:
        (stopped,) = llm.generate_records("x", greedy(ignore_eos=False), use_tqdm=False)
        (ignored,) = llm.generate_records("x", greedy(), use_tqdm=False)
    finally:
        object.__setattr__(limits, "eos_token_id", original)
    assert (len(stopped), stopped[0].finish_reason) == (1, FinishReason.STOP)
    assert (len(ignored), ignored[-1].finish_reason) == (6, FinishReason.LENGTH)


def test_context_limit_ends_a_request(llm):
    ids = [5] * 510
    (records,) = llm.generate_records(prompt_token_ids=[ids], sampling_params=greedy(), use_tqdm=False)
    assert (len(records), records[-1].finish_reason) == (2, FinishReason.LENGTH)


def png(width, height, color):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "PNG")
    return buffer.getvalue()


def test_images_reach_the_model(llm):
    prompt = f"look: {IMAGE} done"
    red, blue = ({"image_bytes": [png(120, 90, color)]} for color in ("red", "blue"))
    outputs = llm.generate_records([prompt, prompt], greedy(top_logprobs=1), use_tqdm=False, multi_modal_data=[red, blue])
    assert outputs[0][0].prompt_len > 1 + len("look:  done") + 2  # more than the two delimiters
    assert outputs[0][0].top_logprobs != outputs[1][0].top_logprobs
    assert_everything_returned(llm)


def test_streaming_gives_the_same_tokens_and_closing_ends_the_request(llm):
    streamed = [each.token_id for each in llm.stream("stream", greedy())]
    assert [streamed] == token_ids(llm, ["stream"], greedy())
    stream = llm.stream("stream", greedy())
    next(stream)
    stream.close()
    assert_everything_returned(llm)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, RequestError, "give one of them"),
        ({"prompt_token_ids": [[]]}, RequestError, "prompt is empty"),
        ({"prompt_token_ids": [[3, 999]]}, RequestError, "token id 999 at position 1"),
        ({"prompt_token_ids": [[3.5]]}, RequestError, "not a whole number"),
        ({"prompt_token_ids": ["text"]}, RequestError, "text goes to prompts"),
        ({"prompt_token_ids": [[5] * 512]}, ContextTooLong, "512 tokens leaves no room"),
        ({"prompts": [b"bytes"]}, RequestError, "prompts are strings"),
        ({"prompts": ["a", "b"], "prompt_token_ids": [[3]]}, RequestError, "2 prompts and 1"),
        ({"prompts": ["a"], "sampling_params": []}, RequestError, "0 sampling_params for 1"),
        ({"prompts": ["a"], "multi_modal_data": [{"image_bytes": [b"x"]}]}, RequestError, "0 image placeholder"),
        ({"prompts": [IMAGE], "multi_modal_data": [{"image_bytes": [b"x"]}]}, RequestError, "cannot be decoded"),
        ({"prompts": ["a"], "multi_modal_data": [{"audio": 1}]}, RequestError, "multi_modal_data has audio"),
        ({"prompt_token_ids": [[270]]}, RequestError, "1 image placeholder"),
    ],
)
def test_bad_prompts_say_what_is_wrong(llm, given, error, says):
    with pytest.raises(error, match=says):
        llm.generate(use_tqdm=False, **given)
    assert_everything_returned(llm)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "not finite"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"top_logprobs": 1001}, "top_logprobs=1001"),
        ({"first_n_token_no_eos": -1}, "first_n_token_no_eos=-1"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes'"),
        ({"seq_seed": 1.5}, "seq_seed=1.5"),
        ({"so_args": {"regex": "a"}}, "unknown key 'regex'"),
    ],
)
def test_bad_sampling_values_say_what_is_wrong(given, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(**given)


def test_zero_max_tokens_counts_as_one_and_seeds_are_64_bits():
    params = SamplingParams(max_tokens=0, seq_seed=2**64 + 7)
    assert (params.max_tokens, params.seq_seed) == (1, 7)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "no/such/place"}, "neither a directory nor a known name"),
        ({"max_model_len": 100_000}, "exceeds the model's 65536 positions"),
        ({"max_model_len": 1}, "at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 2}, "cannot hold one token of each"),
        ({"max_num_sequences": 4}, "did you mean max_num_seqs"),
        ({"expert_parallel_size": 8}, "expert_parallel_size=8 is not supported"),
        ({"tokens_per_block": 3}, "even number"),
        ({"load_format": "fast"}, "must be one of auto, dummy"),
        ({"device": "tpu"}, "device"),
        ({"max_num_seqs": 12_680, "max_model_len": 60_000}, "more than 80%"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
    ],
)
def test_bad_settings_say_what_is_wrong(given, says):
    with pytest.raises(ConfigError, match=says):
        LLM(**{"model": "random", "device": "cpu", "progress": False, **given})


def test_a_closed_model_says_so():
    llm = LLM("random", device="cpu", progress=False, load_format="dummy", max_num_seqs=1, max_model_len=32)
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("x")


def test_streams_and_batches_in_between_get_their_own_records(llm):
    alone = {text: token_ids(llm, [text], greedy())[0] for text in ("one", "two", "three")}
    streams = {text: llm.stream(text, greedy()) for text in ("one", "two")}
    got = {text: [next(stream).token_id] for text, stream in streams.items()}
    assert token_ids(llm, ["three"], greedy()) == [alone["three"]]
    for text, stream in streams.items():
        got[text] += [each.token_id for each in stream]
        assert got[text] == alone[text]
    assert_everything_returned(llm)


def test_an_interrupted_call_harms_nothing_and_returns_everything(llm):
    expected = token_ids(llm, PROMPTS[:2], greedy())
    is_inside = False

    def ring(*_):
        if is_inside:
            raise KeyboardInterrupt

    def interrupted():
        nonlocal is_inside
        is_inside = True
        try:
            token_ids(llm, PROMPTS, greedy(max_tokens=400))
        finally:
            is_inside = False

    stream = llm.stream("one", greedy())
    streamed = [next(stream).token_id]
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for milliseconds in (1, 60):
            signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000, 0.001)  # and again during the cleanup
            with pytest.raises(KeyboardInterrupt):
                interrupted()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert token_ids(llm, PROMPTS[:2], greedy()) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [streamed + [each.token_id for each in stream]] == token_ids(llm, ["one"], greedy())
    assert_everything_returned(llm)


def test_threads_share_a_model(llm):
    params = [greedy(max_tokens=count) for count in (4, 2, 3)]
    expected = token_ids(llm, PROMPTS, params)
    with ThreadPoolExecutor(6) as threads:
        alone = [threads.submit(token_ids, llm, [prompt], each) for prompt, each in zip(PROMPTS, params, strict=True)]
        together = [threads.submit(token_ids, llm, PROMPTS, params) for _ in range(2)]
        assert [each.result() for each in alone] == [[each] for each in expected]
        assert [each.result() for each in together] == [expected] * 2
    assert_everything_returned(llm)


def test_a_step_that_breaks_ends_the_model_and_its_memory_can_be_given_back():
    llm = LLM("random", device="cpu", progress=False, load_format="dummy", max_num_seqs=2, max_model_len=32)
    worker = llm._core.executor.worker
    stream = llm.stream("x", greedy())
    next(stream)
    worker.launch = lambda plan: 1 / 0
    for use in (lambda: list(stream), lambda: llm.generate("x", use_tqdm=False), lambda: next(llm.stream("x"))):
        with pytest.raises(StepFailed, match=r"a step failed \(ZeroDivisionError: division by zero\); restart the engine"):
            use()
    assert not llm._boxes
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("x")


def test_a_model_that_is_not_a_number_gives_no_token():
    llm = LLM("random", device="cpu", progress=False, load_format="dummy", max_num_seqs=2, max_model_len=32)
    llm._core.executor.worker.model.norm[3] = float("nan")
    for _ in range(2):
        with pytest.raises(StepFailed, match="are not finite numbers, so that no token can be trusted"):
            llm.generate("x", use_tqdm=False)
    llm.close()


def test_a_prompt_that_is_sent_again_is_answered_from_its_own_state(llm):
    prompt = "The same words, sent again, find the state that they left. " * 6
    params = SamplingParams(temperature=0.7, seq_seed=11, max_tokens=6, ignore_eos=True)
    (cold,), (again,) = (llm.generate_records(prompt, params, use_tqdm=False) for _ in range(2))
    assert (cold[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 128)
    assert [(each.token_id, each.token_logprobs) for each in again] == [(each.token_id, each.token_logprobs) for each in cold]


def test_completions_come_as_they_complete_with_the_records_of_a_batch(llm):
    ids = [llm.prompt_ids(text) for text in PROMPTS]
    params = [greedy(max_tokens=20), greedy(max_tokens=2), greedy(max_tokens=6, n=2)]
    expected = [[each.token_id for each in one] for one in llm.generate_records(PROMPTS, params, use_tqdm=False)]
    found = []
    for number, answers in llm.completions(ids, params):
        found.append((number, [[each.token_id for each in one] for one in answers]))
        llm.generate_records(["another batch turns the engine in between"], greedy(max_tokens=30), use_tqdm=False)
    assert found[0][0] == 1, "the shortest is complete first"
    assert [answer for _, answers in sorted(found) for answer in answers] == expected
    assert_everything_returned(llm)


def test_completions_that_are_closed_leave_nothing(llm):
    with contextlib.closing(llm.completions([[0, 5], [0, 6]], [greedy(max_tokens=2), greedy(max_tokens=100)])) as completions:
        assert next(completions)[0] == 0
    assert_everything_returned(llm)
    assert list(llm.completions([])) == []


def test_an_id_used_again_on_the_same_slot_gets_its_own_parameters():
    small = LLM("random", device="cpu", progress=False, max_num_seqs=1, max_model_len=64, enable_prefix_cache=False)
    core = small._core

    def run(params):
        core.add(Request(request_id="same", prompt_token_ids=(0, 5, 6, 7), params=params))
        records = []
        while not core.is_idle:
            records += core.step()
        return [each.token_id for each in records]

    first = run(greedy(max_tokens=12))
    sampled = run(SamplingParams(seq_seed=3, max_tokens=12, ignore_eos=True))
    assert sampled != first
    assert (
        sampled
        == token_ids(small, None, SamplingParams(seq_seed=3, max_tokens=12, ignore_eos=True), prompt_token_ids=[[0, 5, 6, 7]])[0]
    )
    small.close()
