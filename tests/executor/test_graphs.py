"""Buckets and captured graphs: there are few shapes, and a replay equals an ordinary run."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.executor.graphs import Buckets, Graphs, PaddedStep, bucket
from deepinfer.step import PLACEHOLDER, Chunk, Round, StepPlan
from tests.devices import no_waits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("interval", "buckets"),
    [
        (8, [1, 2, 4, 8, 16, 24, 32]),
        (1, [1, 2, 3, 4, 5]),
        (6, [1, 2, 4, 6, 12, 18]),
        (1 << 62, [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_tiers_are_powers_of_two_below_the_interval_and_its_multiples_above(interval, buckets):
    assert sorted({bucket(count, interval) for count in range(1, buckets[-1] + 1)}) == buckets
    for count in range(1, buckets[-1] + 1):
        assert bucket(count, interval) == min(each for each in buckets if each >= count)


def round_of(number, num_pages, max_drafts):
    return Round(
        request_id=f"r{number}", slot=number + 1, start=7 * number, max_drafts=max_drafts, page_ids=np.arange(1, num_pages + 1)
    )


@given(
    pages=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    num_drafts=st.integers(0, 150),
    rows=st.integers(1, 40),
    requests=st.integers(1, 20),
)
def test_a_padded_plan_is_the_plan_and_then_padding_rounds(pages, num_drafts, rows, requests):
    plan = StepPlan(chunks=(), rounds=tuple(round_of(i, count, i % 6) for i, count in enumerate(pages)), num_drafts=num_drafts)
    made = Buckets(rows=rows, requests=requests).pad(plan)
    if not made.recurs:
        assert made == PaddedStep.of(plan)
        filled = bucket(len(pages), requests) * bucket(max(pages), 1 << 62)
        assert filled > 8 * sum(pages)
        return
    padded, num_rows = made.plan, made.num_round_rows
    assert made.num_rounds == len(pages)
    assert made.num_padding_rows == num_rows - len(pages) - num_drafts >= 0
    assert (padded.chunks, padded.num_drafts, padded.page_copies) == ((), num_drafts, ())
    assert len(padded.rounds) == bucket(len(pages), requests)
    assert num_rows == bucket(len(padded.rounds) + num_drafts, rows)
    (width,) = {len(each.page_ids) for each in padded.rounds}
    assert max(pages) <= width < 2 * max(pages)
    for each, original in zip(padded.rounds, plan.rounds, strict=False):
        assert (each.request_id, each.slot, each.start, each.max_drafts) == (
            original.request_id,
            original.slot,
            original.start,
            original.max_drafts,
        )
        assert each.page_ids.tolist() == original.page_ids.tolist() + [0] * (width - len(original.page_ids))
    for each in padded.rounds[len(pages) :]:
        assert (each.request_id, each.slot, each.max_drafts, each.page_ids.any()) == (PLACEHOLDER, 0, 0, False)


def test_plans_that_would_be_mostly_filling_are_left_alone():
    short, long = [round_of(number, 1, 5) for number in range(60)], round_of(60, 1000, 5)
    assert Buckets().pad(StepPlan(chunks=(), rounds=tuple(short))).recurs
    assert Buckets().pad(StepPlan(chunks=(), rounds=(long,))).recurs
    assert not Buckets().pad(StepPlan(chunks=(), rounds=(*short, long))).recurs
    chunk = Chunk(request_id="a", slot=1, start=0, token_ids=np.zeros(3, np.int32), page_ids=np.ones(1, np.int32))
    assert not Buckets().pad(StepPlan(chunks=(chunk,), rounds=tuple(short))).recurs
    assert not Buckets().pad(StepPlan(chunks=(chunk,))).recurs


def test_the_tier_follows_the_drafts_that_are_verified():
    """If the bucket counted made drafts, verifying fewer drafts would save nothing."""
    rounds = tuple(round_of(number, 1, 5) for number in range(64))
    sizes = [Buckets().pad(StepPlan(chunks=(), rounds=rounds, num_drafts=count)).num_round_rows for count in (0, 60, 200, 320)]
    assert sizes == [64, 128, 264, 384]


def test_without_a_device_that_has_graphs_every_body_is_run():
    graphs = Graphs(CPU)
    results = [graphs.run("key", lambda x: x + 1, torch.tensor([value])) for value in range(4)]
    assert [int(each) for each in results] == [1, 2, 3, 4]
    assert (graphs.num_captured, graphs.num_replays) == (0, 0)


# ----------------------------------------------------------------------------------------------------------------- on the device


def adding(memory, calls):
    """A body with state: it adds its arguments, on host and device, to a running sum, and returns the sum."""

    def body(one, other):
        calls.append(1)
        memory.add_(one.sum()).add_(other.sum())
        return memory * 2

    return body


@pytest.mark.gpu
def test_a_key_is_run_then_captured_then_replayed():
    memory, calls, total = torch.zeros(1, dtype=torch.int64, device=CUDA), [], 0
    graphs, body = Graphs(CUDA), adding(memory, calls)
    with no_waits(CUDA):
        results = []
        for value in range(1, 6):
            one, other = torch.full((3,), value), torch.full((2,), 10 * value).pin_memory().to(CUDA, non_blocking=True)
            results.append(graphs.run("key", body, one, other).clone())
    for value, found in enumerate(results, 1):
        total += 3 * value + 20 * value
        assert int(found) == 2 * total, "each step takes effect once"
    assert (len(calls), graphs.num_captured, graphs.num_replays) == (2, 1, 4)


@pytest.mark.gpu
def test_keys_have_graphs_of_their_own_and_the_least_used_goes_first():
    memory, calls = torch.zeros(1, dtype=torch.int64, device=CUDA), []
    graphs, zero = Graphs(CUDA, max_graphs=2), torch.zeros(1, dtype=torch.int64)

    def run(key, value, count=1):
        for _ in range(count):
            graphs.run(key, adding(memory, calls), torch.full((key,), value), zero)

    run(1, 1, count=2)
    run(2, 1, count=2)
    run(1, 1)
    run(3, 1, count=2)  # replaces key 2
    assert (len(calls), graphs.num_captured) == (6, 3)
    run(1, 1)
    assert (len(calls), graphs.num_captured) == (6, 3)
    run(2, 1)  # this key ran before, so it is captured at once
    assert (len(calls), graphs.num_captured) == (7, 4)
    assert int(memory) == 1 * 4 + 2 * 3 + 3 * 2


@pytest.mark.gpu
def test_no_key_or_disabled_never_captures():
    memory, calls = torch.zeros(1, dtype=torch.int64, device=CUDA), []
    for graphs, key in ((Graphs(CUDA), None), (Graphs(CUDA, enabled=False), "key")):
        for _ in range(3):
            graphs.run(key, adding(memory, calls), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
        assert graphs.num_captured == 0
    assert (len(calls), int(memory)) == (6, 12)
