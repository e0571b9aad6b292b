"""The load of experts, and the loss that evens it out."""

import torch

from training.experts import load_of


def test_even_use_costs_one_and_padding_does_not_count():
    affinities = torch.full((12, 4), 0.25, dtype=torch.float64)
    expert_ids = torch.arange(24).view(12, 2) % 4
    is_known = torch.ones(2, 6, dtype=torch.bool)
    load = load_of(affinities, expert_ids, is_known)
    assert load.counts.tolist() == [6, 6, 6, 6]
    assert load.loss == 1
    is_known[:, 4:] = False
    expert_ids.view(2, 6, 2)[:, 4:] = torch.tensor([0, 1])  # what padding prefers
    load = load_of(affinities, expert_ids, is_known)
    assert load.counts.tolist() == [4, 4, 4, 4]
    assert load.loss == 1


def test_each_sequence_counts_by_itself():
    expert_ids = torch.tensor([[0, 1]] * 4 + [[2, 3]] * 4)  # even over both sequences, but not within one
    affinities = torch.zeros(8, 4, dtype=torch.float64).scatter_(1, expert_ids, 0.5).requires_grad_()
    load = load_of(affinities, expert_ids, torch.ones(2, 4, dtype=torch.bool))
    assert load.counts.tolist() == [4, 4, 4, 4]
    assert load.loss == 2
    load.loss.backward()
    assert (affinities.grad.gather(1, expert_ids) > 0).all()
