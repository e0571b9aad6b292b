"""Two long sessions in turn: each turn finds the pages of its earlier turns, with and without a saved state."""

import numpy as np
import pytest

from deepinfer.config import named_config
from deepinfer.kv.layout import KVLayout
from deepinfer.kv.manager import KVManager
from deepinfer.request import FinishReason, Request, SamplingParams
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.scheduler import Scheduler
from tests.scheduler.memory import MemoryWorker

CONFIG = named_config("full")
LAYOUT = KVLayout(CONFIG)
PAGE, WINDOW = LAYOUT.page_tokens, CONFIG.sliding_window
FIRST_TOKENS, NUM_TURNS = 20_000, 10
MAX_MODEL_LEN = 24_000
EXACT_REPLAY = CONFIG.num_hidden_layers * (WINDOW - 1)


class Engine:
    """A scheduler one step ahead of a worker that checks every read; pages for two whole sessions, one request at a time."""

    def __init__(self, *, num_spare_slots, replay_tokens, budget=4096):
        num_pages, num_slots = 2 * LAYOUT.pages_for(MAX_MODEL_LEN) + 1, 2 + num_spare_slots
        self.kv = KVManager(
            LAYOUT,
            num_pages=num_pages,
            num_slots=num_slots,
            replay_tokens=replay_tokens,
            is_replay_exact=replay_tokens == EXACT_REPLAY,
        )
        limits = Limits(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
            max_num_batched_tokens=budget,
            eos_token_id=CONFIG.eos_token_id,
            image_token_id=CONFIG.image_token_id,
        )
        self.scheduler = Scheduler(self.kv, limits)
        self.worker = MemoryWorker(
            LAYOUT,
            num_pages=num_pages,
            num_slots=num_slots,
            max_model_len=MAX_MODEL_LEN,
            image_token_id=CONFIG.image_token_id,
        )

    def answer(self, request):
        """Run one request to its end; returns its records."""
        self.scheduler.add(request)
        self.worker.add(request)
        records, ahead = [], None
        while ahead is not None or not self.scheduler.is_idle:
            plan = self.scheduler.plan()
            if ahead is not None:
                records += self.scheduler.commit(*ahead)
            ahead = None if plan is None else (plan, self.worker.run(plan))
        self.scheduler.check()
        self.kv.check()
        assert records[-1].finish_reason == FinishReason.LENGTH
        return records


def take_turns(engine, rng, *, shortest_question=20):
    """Run sessions "a" and "b" in turn.  Returns, for all but the first turns, tokens that a hit could save, and saved tokens."""
    texts = {name: rng.integers(100, 1000, FIRST_TOKENS).tolist() for name in "ab"}
    computed = dict.fromkeys(texts, 0)
    could, were = [], []
    for turn in range(NUM_TURNS):
        for name, text in texts.items():
            if turn:
                text += rng.integers(100, 1000, int(rng.integers(shortest_question, 300))).tolist()
            sampling = SamplingParams(max_tokens=int(rng.integers(1, 100)), ignore_eos=True, seq_seed=0)
            request = Request(request_id=f"{name}{turn}", prompt_token_ids=tuple(text), params=sampling)
            records = engine.answer(request)
            assert {each.num_cached_tokens for each in records} == {records[0].num_cached_tokens}
            if turn:
                could.append(min(computed[name], len(text) - engine.kv.margin) // PAGE * PAGE)
                were.append(records[0].num_cached_tokens)
            else:
                assert records[0].num_cached_tokens == 0, "the sessions have nothing in common"
            text += [each.token_id for each in records]
            computed[name] = len(text) - 1  # the last token was sampled but not computed
    return could, were


@pytest.mark.parametrize("num_spare_slots", [0, 1])
def test_a_session_is_found_again_though_the_other_took_its_state(num_spare_slots, seed):
    engine = Engine(num_spare_slots=num_spare_slots, replay_tokens=WINDOW)
    could, were = take_turns(engine, np.random.default_rng(seed))
    assert min(could) > FIRST_TOKENS - engine.kv.margin - PAGE
    assert sum(were) >= 0.95 * sum(could)
    counts = engine.kv.counts
    assert counts.num_hit_tokens == sum(could), "every page that could be hit was"
    assert (counts.num_replay_hits, counts.num_state_hits) == (len(could), 0), "the other session's state took the place"
    assert engine.kv.num_saved_states == num_spare_slots
    assert counts.num_replayed_tokens == len(could) * WINDOW
    assert counts.num_evicted_pages == 0, "the pool holds both"


def test_exact_replay_finds_the_same_pages(seed):
    engine = Engine(num_spare_slots=0, replay_tokens=EXACT_REPLAY)
    could, were = take_turns(engine, np.random.default_rng(seed))
    counts = engine.kv.counts
    assert counts.num_hit_tokens == sum(could)
    assert were == [each - EXACT_REPLAY for each in could]


def test_with_room_for_both_states_nothing_is_replayed(seed):
    engine = Engine(num_spare_slots=3, replay_tokens=WINDOW)  # room for the old and the new state
    # With a shorter question, the hit could end before the only boundary with a saved state.
    could, were = take_turns(engine, np.random.default_rng(seed), shortest_question=engine.kv.margin)
    counts = engine.kv.counts
    assert (counts.num_replay_hits, counts.num_state_hits) == (0, len(could))
    assert counts.num_replayed_tokens == 0
    assert were == could


def asked(name, text, checkpoints=()):
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, seq_seed=0)
    return Request(request_id=name, prompt_token_ids=tuple(text), params=sampling, checkpoints=checkpoints)


@pytest.mark.parametrize("budget", [128, 200, 256, 4096])
@pytest.mark.parametrize("checkpoints", [(256,), (128, 256), (256, 384, 640)])
def test_what_was_asked_for_and_what_a_resend_needs_are_found(budget, checkpoints, seed):
    engine, rng = Engine(num_spare_slots=6, replay_tokens=WINDOW, budget=budget), np.random.default_rng(seed)
    text = rng.integers(100, 1000, 700).tolist()
    engine.answer(asked("first", text, checkpoints))
    assert engine.answer(asked("again", text))[0].num_cached_tokens == (700 - engine.kv.margin) // PAGE * PAGE
    for position in checkpoints:
        more = rng.integers(100, 1000, engine.kv.margin).tolist()
        assert engine.answer(asked(f"shares {position}", text[:position] + more))[0].num_cached_tokens == position
    assert engine.kv.counts.num_replayed_tokens == 0
