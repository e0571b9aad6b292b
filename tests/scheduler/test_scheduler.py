"""Planning and committing: budgets hold, memory comes back, and every request ends exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config import named_config
from deepinfer.errors import ContextTooLong, RequestError
from deepinfer.kv.layout import KVLayout
from deepinfer.request import FinishReason, Request, SamplingParams
from deepinfer.scheduler.scheduler import Limits, Scheduler
from deepinfer.step import Sampled, StepResult

EOS, IMAGE, WORD = 1, 254, 5
LAYOUT = KVLayout(named_config("golden"), page_tokens=4)
LIMITS = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 8}


def make_scheduler(*, num_pages=33, num_slots=5, **limits):
    limits = Limits(**(LIMITS | limits), eos_token_id=EOS, image_token_id=IMAGE)
    return Scheduler(LAYOUT, limits, num_pages=num_pages, num_slots=num_slots)


def make_request(name, prompt=(WORD,) * 3, max_tokens=4, **params):
    return Request(
        request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(max_tokens=max_tokens, seq_seed=0, **params)
    )


def result_of(plan, token_of=lambda name: WORD):
    """What a model would bring that answers ``token_of(request)``."""
    names = [chunk.request_id for chunk in plan.chunks if chunk.num_logits]
    return StepResult(sampled={name: Sampled(token_id=token_of(name), logprob=-1.0) for name in names})


def run_to_the_end(scheduler, token_of=lambda name: WORD):
    """Every output until nothing is left."""
    outputs = []
    while (plan := scheduler.plan()) is not None:
        outputs += scheduler.commit(plan, result_of(plan, token_of))
        scheduler.check()
    assert scheduler.is_idle
    return outputs


# ------------------------------------------------------------------------------------------------------------- histories


class World:
    """A scheduler under a random history, and what must be true of it."""

    def __init__(self, rng, scheduler):
        self.rng, self.scheduler = rng, scheduler
        self.requests = {}
        self.computed = {}  # request -> tokens that plans covered so far
        self.tokens = {}  # request -> prompt and output
        self.ended = {}

    def add(self):
        prompt = [self.rng.choice([WORD, IMAGE, 7]) for _ in range(self.rng.randint(1, 14))]
        name = f"r{len(self.requests)}"
        request = make_request(name, prompt, self.rng.randint(1, 10), ignore_eos=self.rng.random() < 0.3)
        self.scheduler.add(request)
        self.requests[name], self.computed[name], self.tokens[name] = request, 0, prompt

    def abort(self):
        if self.requests:
            name = self.rng.choice(list(self.requests))
            assert self.scheduler.abort(name) == (name not in self.ended)
            self.ended.setdefault(name, FinishReason.ABORT)

    def plan(self):
        plan = self.scheduler.plan()
        if plan is None:
            return None
        limits = self.scheduler.limits
        sizes = [len(chunk.token_ids) for chunk in plan.chunks]
        assert min(sizes) > 0
        assert sum(sizes) <= limits.max_num_batched_tokens
        assert len(sizes) <= limits.max_num_seqs
        slots = [chunk.slot for chunk in plan.chunks]
        assert 0 not in slots
        assert len(set(slots)) == len(slots)
        pages = [page for chunk in plan.chunks for page in chunk.page_ids]
        assert 0 not in pages
        assert len(set(pages)) == len(pages)
        for chunk in plan.chunks:
            self.check_chunk(chunk)
        return plan

    def check_chunk(self, chunk):
        name = chunk.request_id
        assert name not in self.ended
        tokens, end = self.tokens[name], chunk.start + len(chunk.token_ids)
        assert chunk.start == self.computed[name]
        assert chunk.token_ids.dtype == np.int32
        assert chunk.token_ids.tolist() == tokens[chunk.start : end]
        assert chunk.num_image_before == tokens[: chunk.start].count(IMAGE)
        assert chunk.num_logits == (end == len(tokens))
        assert len(chunk.page_ids) == LAYOUT.pages_for(end)

    def commit(self, plan):
        alive = {chunk.request_id for chunk in plan.chunks if chunk.request_id not in self.ended}
        result = result_of(plan, lambda name: self.rng.choice([WORD, WORD, EOS]))
        for chunk in plan.chunks:
            self.computed[chunk.request_id] = chunk.start + len(chunk.token_ids)
        outputs = self.scheduler.commit(plan, result)
        assert [output.request_id for output in outputs] == [name for name in result.sampled if name in alive]
        for output in outputs:
            self.check_output(output, result.sampled[output.request_id].token_id)

    def check_output(self, output, token_id):
        request = self.requests[output.request_id]
        self.tokens[request.request_id].append(token_id)
        num_output = len(self.tokens[request.request_id]) - len(request.prompt_token_ids)
        assert output.token_id == token_id
        assert output.num_output_tokens == num_output
        assert output.prompt_len == len(request.prompt_token_ids)
        expected = None
        if token_id == EOS and not request.params.ignore_eos:
            expected = FinishReason.STOP
        elif num_output == request.params.max_tokens:
            expected = FinishReason.LENGTH
        assert output.finish_reason == expected
        assert output.finished == (expected is not None)
        if expected:
            self.ended[request.request_id] = expected


@settings(max_examples=150)
@given(
    st.randoms(use_true_random=False),
    st.lists(st.sampled_from(["add", "add", "step", "step", "step", "abort", "abort in flight"]), max_size=40),
    st.integers(1, 12),
    st.integers(7, 20),
    st.integers(2, 5),
)
def test_any_history_keeps_every_promise(rng, history, budget, num_pages, num_slots):
    scheduler = make_scheduler(max_num_batched_tokens=budget, num_pages=num_pages, num_slots=num_slots)
    world = World(rng, scheduler)
    for event in history:
        if event == "add":
            world.add()
        elif event == "abort":
            world.abort()
        elif (plan := world.plan()) is not None:
            if event == "abort in flight":
                world.abort()
                scheduler.check()
            world.commit(plan)
        scheduler.check()
        assert scheduler.num_unfinished == len(world.requests) - len(world.ended)
    while (plan := world.plan()) is not None:
        world.commit(plan)
        scheduler.check()
    assert scheduler.is_idle
    assert set(world.ended) == set(world.requests)
    assert scheduler.pages.num_held == scheduler.slots.num_held == 0


# --------------------------------------------------------------------------------------------------------------- planning


def test_nothing_to_do_is_no_plan():
    scheduler = make_scheduler()
    assert scheduler.is_idle
    assert scheduler.plan() is None


def test_long_prompt_is_cut_to_the_budget_and_asks_for_logits_at_its_end():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(10, 29)))
    seen = []
    for _ in range(3):
        plan = scheduler.plan()
        seen += [(chunk.start, len(chunk.token_ids), chunk.num_logits) for chunk in plan.chunks]
        scheduler.commit(plan, result_of(plan))
    assert seen == [(0, 8, 0), (8, 8, 0), (16, 3, 1)]


def test_decoding_goes_before_prompts():
    scheduler = make_scheduler()
    scheduler.add(make_request("first", (WORD,) * 3))
    plan = scheduler.plan()
    scheduler.commit(plan, result_of(plan))
    scheduler.add(make_request("second", (WORD,) * 20))
    scheduler.add(make_request("third", (WORD,) * 2))
    plan = scheduler.plan()
    assert [(chunk.request_id, len(chunk.token_ids)) for chunk in plan.chunks] == [("first", 1), ("second", 7)]


def test_requests_are_admitted_in_order_of_arrival_as_slots_allow():
    scheduler = make_scheduler(num_slots=3)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, (WORD,)))
    assert [chunk.request_id for chunk in scheduler.plan().chunks] == ["a", "b"]
    scheduler.abort("a")
    assert [chunk.request_id for chunk in scheduler.plan().chunks] == ["b", "c"]


def test_request_waits_until_pages_for_its_longest_output_are_free():
    scheduler = make_scheduler(num_pages=4)
    scheduler.add(make_request("a", (WORD,) * 5, max_tokens=3))
    scheduler.add(make_request("b", (WORD,) * 5, max_tokens=3))
    assert [chunk.request_id for chunk in scheduler.plan().chunks] == ["a"]
    assert scheduler.pages.num_free == 1
    scheduler.abort("a")
    assert [chunk.request_id for chunk in scheduler.plan().chunks] == ["b"]


def test_no_more_requests_run_than_the_limit():
    scheduler = make_scheduler(max_num_seqs=2)
    for number in range(4):
        scheduler.add(make_request(str(number), (WORD,)))
    assert len(scheduler.plan().chunks) == 2


# -------------------------------------------------------------------------------------------------------------- endings


def test_end_token_stops():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    (output,) = run_to_the_end(scheduler, lambda name: EOS)
    assert (output.token_id, output.finish_reason, output.num_output_tokens) == (EOS, FinishReason.STOP, 1)


def test_ignored_end_token_does_not_stop():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", ignore_eos=True))
    outputs = run_to_the_end(scheduler, lambda name: EOS)
    assert [output.finish_reason for output in outputs] == [None, None, None, FinishReason.LENGTH]


def test_end_token_at_the_length_limit_counts_as_stop():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=1))
    (output,) = run_to_the_end(scheduler, lambda name: EOS)
    assert output.finish_reason == FinishReason.STOP


def test_context_limit_ends_by_length():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", (WORD,) * 30, max_tokens=10))
    outputs = run_to_the_end(scheduler)
    assert len(outputs) == 2
    assert outputs[-1].finish_reason == FinishReason.LENGTH


def test_output_repeats_what_was_sampled():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    plan = scheduler.plan()
    sampled = Sampled(token_id=9, logprob=-0.5, top_token_ids=(9, 8), top_logprobs=(-0.5, -2.0))
    (output,) = scheduler.commit(plan, StepResult(sampled={"a": sampled}))
    assert (output.token_id, output.token_logprobs) == (9, -0.5)
    assert (output.top_token_ids, output.top_logprobs) == ((9, 8), (-0.5, -2.0))
    assert output.max_num_batched_tokens == LIMITS["max_num_batched_tokens"]


def test_abort_returns_every_page_and_slot():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    scheduler.plan()
    assert scheduler.abort("a")
    assert scheduler.is_idle
    assert scheduler.pages.num_held == scheduler.slots.num_held == 0


def test_waiting_request_can_be_aborted():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    assert scheduler.abort("a")
    assert scheduler.plan() is None


def test_abort_of_an_unknown_request_says_so():
    assert not make_scheduler().abort("nobody")


def test_result_of_an_aborted_request_is_passed_over():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    plan = scheduler.plan()
    scheduler.abort("a")
    assert scheduler.commit(plan, result_of(plan)) == []


def test_id_is_free_again_once_its_request_has_ended():
    scheduler = make_scheduler()
    for _ in range(2):
        scheduler.add(make_request("a"))
        assert len(run_to_the_end(scheduler)) == 4


# --------------------------------------------------------------------------------------------------------------- refusals


def test_empty_prompt_is_refused():
    with pytest.raises(RequestError, match=r"^the prompt is empty; give at least one token$"):
        make_scheduler().add(make_request("a", ()))


@pytest.mark.parametrize("is_running", [False, True])
def test_second_request_of_an_id_is_refused(is_running):
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    if is_running:
        scheduler.plan()
    with pytest.raises(RequestError, match=r"^request id 'a' is in use; choose another$"):
        scheduler.add(make_request("a"))


def test_prompt_that_fills_the_context_is_refused():
    sentence = (
        r"^prompt of 32 tokens leaves no room for output in the context limit of 32; shorten the prompt or raise max_model_len$"
    )
    with pytest.raises(ContextTooLong, match=sentence):
        make_scheduler().add(make_request("a", (WORD,) * 32))
    make_scheduler().add(make_request("a", (WORD,) * 31))


def test_request_that_no_pool_of_this_size_could_hold_is_refused():
    sentence = (
        r"^the request may need 5 pages of 4 tokens, the pool has 4; "
        r"lower max_tokens, shorten the prompt or give the engine more memory$"
    )
    with pytest.raises(RequestError, match=sentence):
        make_scheduler(num_pages=5).add(make_request("a", (WORD,) * 10, max_tokens=7))
    make_scheduler(num_pages=5).add(make_request("a", (WORD,) * 10, max_tokens=6))


def test_refused_request_leaves_no_trace():
    scheduler = make_scheduler()
    with pytest.raises(RequestError):
        scheduler.add(make_request("a", ()))
    assert scheduler.is_idle
