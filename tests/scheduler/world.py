"""A scheduler, a worker that checks every read and write, and the invariants of both."""

import numpy as np

from deepinfer.config import named_config
from deepinfer.kv.layout import KVLayout
from deepinfer.kv.manager import KVManager
from deepinfer.request import FinishReason, Request, SamplingParams
from deepinfer.scheduler.budget import CostCurve, DraftBudget
from deepinfer.scheduler.limits import Limits
from deepinfer.scheduler.scheduler import Scheduler
from tests.scheduler.memory import MemoryWorker

EOS, IMAGE, WORD = 1, 254, 5
PAGE = 4
LAYOUT = KVLayout(named_config("golden"), page_tokens=PAGE)
WINDOW = LAYOUT.config.sliding_window


class World:
    """Invariant: everything that :meth:`step` asserts."""

    def __init__(
        self,
        *,
        is_async=False,
        num_pages=40,
        num_slots=6,
        replay=WINDOW,
        kv=None,
        is_adaptive=False,
        accept=None,
        seed=0,
        **limits,
    ):
        given = {"max_model_len": 72, "max_num_seqs": 4, "max_num_batched_tokens": 16, "eos_token_id": EOS}
        self.limits = Limits(**(given | limits), image_token_id=IMAGE)
        keep = self.limits.decoder_keep_tokens
        margin = max(WINDOW + 6, keep)
        self.kv = KVManager(LAYOUT, num_pages=num_pages, num_slots=num_slots, replay_tokens=replay, margin=margin, **(kv or {}))
        num_drafts = self.limits.num_drafts
        curve = CostCurve([1, 2, 4, 8, 16], [1.0, 1.1, 1.6, 2.8, 5.0])
        budget = DraftBudget(num_slots, num_drafts, curve) if is_adaptive and num_drafts else None
        self.scheduler = Scheduler(self.kv, self.limits, budget)
        self.worker = MemoryWorker(
            LAYOUT,
            num_pages=num_pages,
            num_slots=num_slots,
            max_model_len=self.limits.max_model_len,
            image_token_id=IMAGE,
            num_drafts=num_drafts,
            accept=accept,
            seed=seed,
        )
        self.is_async = is_async
        self.in_flight = []
        self.requests = {}
        self.sequences = {}
        self.ended = {}
        self.outputs = {}
        self.planned = {}  # request -> (end of its last chunk or None after a round, its decoder floor)
        self.cached = {}  # request -> tokens of its prompt that were not computed
        self.stem_of = {}  # request -> content of its pictures
        self.num_restarts = self.num_restarted_prompts = self.num_branched = 0
        self.num_saved = self.num_unsaved = 0  # saved by rounds; not saved because no round reached the end of the page
        self.num_cut = 0  # requests that ended inside a round while another round of them was in flight

    def add(self, name, prompt, max_tokens=4, *, is_schedulable=True, parent=None, **given):
        names = {"priority", "salt", "image_hashes", "checkpoints"} & given.keys()
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, seq_seed=0, **{k: v for k, v in given.items() if k not in names}),
            **{k: given[k] for k in names},
        )
        if parent is None:
            self.scheduler.add(request, is_schedulable=is_schedulable)
        else:
            self.scheduler.fork(parent, request, is_schedulable=is_schedulable)
        self.requests[name], self.outputs[name] = request, []
        self.sequences[name] = self.worker.add(request)
        return request

    def abort(self, *names):
        alive = [name for name in dict.fromkeys(names) if self.scheduler.is_unfinished(name)]
        num_tokens = sum(len(self.requests[name].prompt_token_ids) + len(self.outputs[name]) for name in alive)
        assert self.scheduler.abort(names) == (len(alive), num_tokens)
        for name in alive:
            self.ended[name] = FinishReason.ABORT

    @property
    def alive(self):
        """Unfinished requests.  The record of a request that has just ended may still come."""
        return [name for name in self.requests if self.scheduler.is_unfinished(name)]

    def told(self, name):
        """Prompt and committed output of a request."""
        return list(self.requests[name].prompt_token_ids) + self.outputs[name]

    def prompt_logprobs(self, name):
        """The worker's log-probabilities of a prompt, if the request asked; each depends on its own token only."""
        request = self.requests[name]
        if not request.params.prompt_logprobs:
            return None
        return (None, *(-float(token_id) for token_id in request.prompt_token_ids[1:]))

    def prompt_top_ids(self, name):
        """The worker's most likely tokens of a prompt, if the request asked: always the prompt's own tokens."""
        request = self.requests[name]
        if not (request.params.prompt_logprobs and request.params.top_logprobs):
            return None
        return ((), *((token_id,) for token_id in request.prompt_token_ids[1:]))

    def check(self):
        self.scheduler.check()
        self.kv.check()
        assert self.scheduler.num_unfinished == len(self.requests) - len(self.ended) - self._num_untold()

    def _num_untold(self):
        return len(self.scheduler._outputs)  # requests that ended and whose records were not taken yet

    def step(self):
        """One turn of the engine's loop; returns whether there was work."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._check_plan(plan)
            self.in_flight.append((plan, self.worker.run(plan)))
        busy = bool(self.in_flight)
        if self.in_flight and (not self.is_async or len(self.in_flight) == 2 or plan is None):
            self.commit()
        elif plan is None:
            self._take(self.scheduler.take_outputs())
        return busy

    def commit(self):
        plan, result = self.in_flight.pop(0)
        alive = self.scheduler._requests._all
        expected = {name for name in result.sampled if name in alive and alive[name].num_in_flight}
        savings = [row.saving for each in plan.rounds if (row := alive.get(each.request_id)) and row.saving and row.num_in_flight]
        outputs = self.scheduler.commit(plan, result)
        self._take(outputs)
        assert {each.request_id for each in outputs if each.token_id is not None} <= expected
        self.num_saved += sum(saving.is_done for saving in savings)
        kept = {id(row.saving) for row in self.scheduler._requests.running.values()}
        self.num_unsaved += sum(not saving.is_done and id(saving) not in kept for saving in savings)
        ahead = {each.request_id for plan, _ in self.in_flight for each in plan.rounds}
        for name in {each.request_id for each in outputs if each.finished} & ahead & expected:
            self.num_cut += self.outputs[name][-1] != result.sampled[name].token_ids[-1]

    def drain(self):
        """Run until idle and check that all memory is free and all records came; returns the number of turns."""
        for name in self.alive:
            assert self.scheduler.set_schedulable(name, True)
        num_turns = 0
        while self.step():
            self.check()
            num_turns += 1
            assert num_turns < 3000, f"without end: {self.alive}"
        assert not self.in_flight
        self.check()
        assert self.scheduler.is_idle, f"stuck with {self.alive}"
        assert self.ended.keys() == self.requests.keys()
        assert self.kv.num_free_pages == self.kv.num_pages
        assert self.kv.num_free_slots == self.kv.num_slots
        stats = self.scheduler.stats()
        assert self.num_restarts <= stats.num_preempted
        assert sum(stats.num_finished.values()) == len(self.requests)
        assert stats.num_output_tokens == sum(len(each) for each in self.outputs.values())
        assert stats.num_computed_tokens <= self.worker.num_rows
        for reason, count in stats.num_finished.items():
            assert count == list(self.ended.values()).count(reason)
        return num_turns

    def _check_plan(self, plan):
        limits, chunks, rounds = self.limits, plan.chunks, plan.rounds
        assert all(len(chunk.token_ids) for chunk in chunks)
        assert 0 <= plan.num_drafts <= sum(each.max_drafts for each in rounds)
        assert self.scheduler._budget or plan.num_drafts == sum(each.max_drafts for each in rounds)
        assert 0 < plan.num_rows <= limits.max_num_batched_tokens
        assert len(chunks) + len(rounds) <= limits.max_num_seqs
        slots = [each.slot for each in (*chunks, *rounds)]
        assert 0 not in slots
        assert len(set(slots)) == len(slots)
        assert len({each.request_id for each in (*chunks, *rounds)}) == len(slots)
        prompts = [chunk for chunk in chunks if chunk.end - chunk.start > 1]
        assert len(prompts) <= 1 or sum(chunk.end for chunk in prompts) <= limits.max_sum_keys
        for each in (*chunks, *rounds):
            assert each.request_id in self.requests, "a planned request is unfinished"
            assert each.request_id not in self.ended, "a request is planned after its end"
            assert each.page_ids.dtype == np.int32
            assert 0 not in each.page_ids
        for chunk in chunks:
            self._check_chunk(chunk)
        for each in rounds:
            self._check_round(each)

    def _check_chunk(self, chunk):
        name = chunk.request_id
        assert chunk.token_ids.dtype == np.int32
        known, num_outputs = len(self.told(name)), len(self.outputs[name])
        assert chunk.samples == (num_outputs == 0 and chunk.end == known), "a prompt brings the first token"
        assert (chunk.anchor_id is not None) == (num_outputs > 0 and chunk.end == known - 1), "an answer goes on with a round"
        assert chunk.end < known + chunk.samples
        last = self.planned.get(name)
        if last is not None and (last[0] != chunk.start or chunk.restore_from is not None or chunk.lookback_ids is not None):
            self.num_restarts += 1
            self.num_restarted_prompts += num_outputs == 0
        if last is not None:
            assert chunk.decoder_floor == last[1], "the decoder floor is the same for life"
        self.num_branched += any(chunk.restore_from == each.slot for each in self.scheduler._requests.running.values())
        if last is None or last[0] != chunk.start:
            assert (chunk.lookback_ids is None) == (chunk.start == 0)
            needs_history = self.requests[name].params.needs_history
            assert (None if chunk.history_ids is None else chunk.history_ids.tolist()) == (
                self.told(name) if needs_history else None
            )
        if self.kv.is_replay_exact is False and last is not None and last[0] != chunk.start:
            assert chunk.start >= chunk.write_floor, "what was preempted is resumed exactly"
        assert chunk.start % 2 == 0 or chunk.window_floor % 2 == 0
        self.planned[name] = (chunk.end, chunk.decoder_floor)

    def _check_round(self, each):
        name = each.request_id
        known, num_in_flight = len(self.told(name)), sum(name in result.sampled for _, result in self.in_flight)
        assert each.start == known + num_in_flight - 1, "a round starts at the anchor"
        assert 0 <= each.max_drafts <= self.limits.num_drafts
        length = len(self.sequences[name].ids)
        assert each.start + 1 + each.max_drafts <= length - 1, "no draft is verified after the last token"
        is_full = self.limits.num_drafts < self.limits.max_num_batched_tokens
        wanted = min(self.limits.num_drafts, length - each.start - 2)
        assert each.max_drafts == wanted or not is_full, "how many drafts there are is the request's own affair"
        assert each.decoder_floor == self.planned[name][1]
        self.planned[name] = (None, each.decoder_floor)

    def _take(self, outputs):
        for output in outputs:
            name = output.request_id
            assert name not in self.ended, "a request ends once"
            request, sequence = self.requests[name], self.sequences[name]
            told = self.outputs[name]
            assert output.prompt_len == len(request.prompt_token_ids)
            assert output.max_num_batched_tokens == self.limits.max_num_batched_tokens
            if output.token_id is None:
                assert output.finish_reason == FinishReason.INSUFFICIENT
                assert self.limits.stop_preempted_request
            else:
                told.append(output.token_id)
                wanted = sequence.output(EOS)
                assert told == wanted[: len(told)]
                expected = None
                if told == wanted:
                    stops = told[-1] == EOS and not request.params.ignore_eos
                    expected = FinishReason.STOP if stops else FinishReason.LENGTH
                assert output.finish_reason == expected
            assert output.num_output_tokens == len(told)
            if not self.limits.decoder_keep_tokens:
                is_first = output.token_id is not None and len(told) == 1
                assert output.prompt_logprobs == (self.prompt_logprobs(name) if is_first else None)
                assert output.prompt_top_token_ids == (self.prompt_top_ids(name) if is_first else None)
            assert output.num_cached_tokens == self.cached.setdefault(name, output.num_cached_tokens), "first admission counts"
            assert output.finished == (output.finish_reason is not None)
            if output.finished:
                self.ended[name] = output.finish_reason


def rows_of(plan):
    """(request, start, end) of rounds and chunks; a round ends after its anchor."""
    rounds = [(each.request_id, each.start, each.start + 1) for each in plan.rounds]
    return rounds + [(chunk.request_id, chunk.start, chunk.end) for chunk in plan.chunks]


def names_of(plan):
    return [name for name, _, _ in rows_of(plan)]


def chunks_of(world):
    """Plan, run and commit one step; returns its rows."""
    return rows_of(plan_of(world))


def plan_of(world):
    """Plan, run and commit one step."""
    plan = world.scheduler.plan()
    assert plan is not None
    world._check_plan(plan)
    result = world.worker.run(plan)
    world.in_flight.append((plan, result))
    world.commit()
    world.check()
    return plan


def run_ahead(world):
    """Plan a step and leave it in flight."""
    plan = world.scheduler.plan()
    assert plan is not None
    world._check_plan(plan)
    world.in_flight.append((plan, world.worker.run(plan)))
    world.check()
    return plan


def words(count, first=2):
    """A prompt without repetition."""
    return [first + number for number in range(count)]
