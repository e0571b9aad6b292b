"""The engine's properties on a GPU, asynchronous; every hidden wait is an error.

The histories are the same as on a CPU.  In the production regime, results have the bits of a fresh run on the same device.  In
fp64, tokens also equal those of the CPU.
"""

import numpy as np
import pytest
import torch

from deepinfer.errors import StepFailed
from deepinfer.executor.graphs import Buckets
from tests.engine.grammars import compiler
from tests.engine.harness import build, drain, params, request, rng_of, tokens, two_turns
from tests.engine.test_constrained import check_answer, work_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def fresh(requests, *, device=CUDA, exact=False, **given):
    core = build(device=device, exact=exact, max_num_seqs=8, spare_slots=0, budget=2000, is_async=False, cache=False, **given)
    results = {}
    for each in requests:
        results |= drain(core, [each])
    core.close()
    return results


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_the_bits_of_a_fresh_run(seed):
    rng = rng_of(seed, 1)
    work = [request(f"r{number}", tokens(rng, int(rng.integers(1, 60))), params(rng)) for number in range(4)]
    core = build(device=CUDA, budget=int(rng.integers(12, 60)), max_num_seqs=3, num_pages=1 + 12)
    assert drain(core, work, rng) == fresh(work)
    core.close()


@pytest.mark.parametrize("mode", ["coupled", "sampled", "argmax"])
def test_drafted_is_plain(mode):
    """Rejection sampling has the distribution of plain decoding, not its text; greedy requests also have its text."""
    seen = dict.fromkeys(["accepted", "rejected", "preempted"], 0)
    for seed in range(4):
        rng = rng_of(seed, 8)
        work = [request(f"r{number}", tokens(rng, int(rng.integers(20, 50))), params(rng, 8)) for number in range(4)]
        core = build(
            device=CUDA,
            num_pages=1 + 8,
            max_num_seqs=3,
            num_drafts=int(rng.integers(1, 6)),
            is_adaptive=bool(seed % 2),
            draft_mode=mode,
            buckets=Buckets(requests=4) if seed < 3 else None,
        )
        got, expected = drain(core, work, rng), fresh(work)
        for each in work:
            if mode == "coupled" or each.params.is_greedy:
                assert got[each.request_id] == expected[each.request_id]
        stats = core.stats()
        seen["accepted"] += sum(stats.num_accepted_drafts)
        seen["rejected"] += sum(stats.num_verified_drafts) - sum(stats.num_accepted_drafts)
        seen["preempted"] += stats.num_preempted
        core.close()
    assert min(seen["rejected"], seen["preempted"]) > 0, seen
    assert seen["accepted"] or mode != "coupled", seen


@pytest.mark.parametrize("seed", range(4))
def test_constrained_drafted_is_plain(seed):
    """Masks come from a host thread while graphs run; nothing else waits."""
    rng = rng_of(seed, 45)
    work = work_of(rng)
    expected = fresh(work, compiler=compiler())
    core = build(
        device=CUDA,
        num_pages=1 + 12,
        max_num_seqs=3,
        num_drafts=int(rng.integers(1, 6)),
        is_adaptive=bool(seed % 2),
        buckets=Buckets(requests=4) if seed < 3 else None,
        compiler=compiler(),
    )
    assert drain(core, work, rng) == expected
    core.close()
    assert sum(check_answer(each, expected[each.request_id]) for each in work) > 0


class AnyTotal:
    """A draft budget that chooses random totals."""

    def __init__(self, rng):
        self.rng = rng

    def choose(self, slots, caps, is_stale, *, num_other_rows, max_rows):
        return int(self.rng.integers(0, min(int(caps.sum()), max_rows - len(caps)) + 1))

    def __getattr__(self, name):
        return lambda *args, **given: None  # ignores all updates


@pytest.mark.parametrize("mode", ["coupled", "sampled"])
def test_one_graph_serves_any_number_of_drafts(mode):
    """Steps with any total, any lengths and any positions: replayed and launched steps give the same bits."""
    work = [
        request(f"r{number}", tokens(rng_of(number, 9), 20), params(rng_of(number, 10), 40, ignore_eos=True))
        for number in range(6)
    ]
    outputs = []
    for buckets in (Buckets(rows=64, requests=8), None):
        core = build(
            device=CUDA, num_drafts=5, draft_mode=mode, draft_budget=AnyTotal(rng_of(0, 11)), buckets=buckets, is_async=False
        )
        graphs, totals = core.executor.worker._graphs, {}
        run = graphs.run

        def recording(key, body, packed, numbers, run=run, totals=totals):
            totals.setdefault(key, set()).add(int(numbers[-1]))
            return run(key, body, packed, numbers)

        graphs.run = recording
        outputs.append(drain(core, work))
        if buckets is not None:
            most = max((values for key, values in totals.items() if key is not None), key=len)
            assert len(most) > 5, "totals that one graph has served"
            assert graphs.num_captured < graphs.num_replays / 2
            assert core.executor.worker._speculator._graphs.num_replays >= graphs.num_replays
        core.close()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("seed", range(4))
def test_cached_with_state_is_fresh(seed):
    rng = rng_of(seed, 2)
    core = build(device=CUDA)
    work, got = two_turns(core, rng, int(rng.integers(40, 70)), 3)
    assert got == fresh(work)
    assert core.stats().num_hit_tokens > 0
    core.close()


@pytest.mark.parametrize("keep", [0, 16])
def test_cached_with_invariant_replay_is_fresh(keep):
    rng = rng_of(keep, 3)
    core = build(device=CUDA, spare_slots=0, exact_replay=True, keep=keep)
    work, got = two_turns(core, rng, 120, 3)
    assert got == fresh(work, keep=keep)
    assert core.stats().num_replayed_tokens > 0
    core.close()


@pytest.mark.parametrize("seed", range(3))
def test_mask_is_compact(seed):
    rng = rng_of(seed, 4)
    work = [request(f"r{number}", tokens(rng, int(rng.integers(10, 80))), params(rng, 3)) for number in range(3)]
    results = []
    for replay_mode in ("mask", "compact"):
        core = build(device=CUDA, keep=16, replay_mode=replay_mode, budget=40)
        results.append(drain(core, work))
        core.close()
    assert results[0] == results[1]


def test_forked_is_separate():
    rng = rng_of(0, 5)
    core = build(device=CUDA)
    parent = request("parent", tokens(rng, 40), params(rng, 8, ignore_eos=True))
    core.add(parent)
    outputs = {"parent": [], "child": []}
    while len(outputs["parent"]) < 3:
        for output in core.step():
            outputs[output.request_id].append((output.token_id, output.token_logprobs))
    stem = parent.prompt_token_ids + tuple(token for token, _ in outputs["parent"])
    child = request("child", stem, params(rng, 5))
    core.fork("parent", child)
    drain(core, outputs=outputs)
    assert outputs == fresh([parent, child])
    core.close()


def test_fp64_tokens_are_the_cpus():
    rng = rng_of(0, 6)
    work = [request(f"r{number}", tokens(rng, int(rng.integers(5, 60))), params(rng, 4)) for number in range(3)]
    core = build(device=CUDA, exact=True)
    got = drain(core, work)
    expected = fresh(work, device=torch.device("cpu"), exact=True)
    for name, records in expected.items():
        assert [token for token, _ in got[name]] == [token for token, _ in records]
        np.testing.assert_allclose([p for _, p in got[name]], [p for _, p in records], atol=1e-9)
    core.close()


def test_a_hidden_wait_is_an_error():
    rng = rng_of(0, 7)
    core = build(device=CUDA)
    drain(core, [request("warm", tokens(rng, 20), params(rng, 2))])
    model = core.executor.worker.model
    run = model.run

    def waiting(inputs, cache, **given):
        outputs = run(inputs, cache, **given)
        outputs.hidden.sum().item()
        return outputs

    def run_to_the_end():
        while not core.is_idle:
            core.step()

    model.run = waiting
    core.add(request("r", tokens(rng, 20), params(rng, 2)))
    with pytest.raises(StepFailed, match="synchroniz"):
        run_to_the_end()
    model.run = run
    core.close()
