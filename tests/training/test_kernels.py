"""Kernels of the training give what plain torch gives."""

import pytest
import torch

from training import choice, experts
from training.packing import Packed
from training.sinkhorn import sinkhorn

pytestmark = [
    pytest.mark.gpu,
    # The compiler of regions looks at gradients of all tensors, and uses a deprecated function of its own package.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
GPU = torch.device("cuda")


def test_sinkhorn_and_its_gradient(seed):
    torch.manual_seed(seed)
    logits, gradient = 2 * torch.randn(1001, 4, 4), torch.randn(1001, 4, 4)
    results = []
    for device in (torch.device("cpu"), GPU):
        x = logits.detach().to(device).requires_grad_()
        y = sinkhorn(x, 20, 1e-6)
        y.backward(gradient.to(device))
        results.append((y.detach().cpu(), x.grad.cpu()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [1, 2])
def test_scores_and_the_best_of_them(seed, ratio):
    torch.manual_seed(seed)
    positions = torch.cat([torch.arange(100), torch.full((4,), -1), torch.arange(408)]).repeat(2, 1)
    packed = Packed(torch.zeros_like(positions), positions)
    there = Packed(packed.token_ids.to(GPU), positions.to(GPU))
    grid = torch.arange(-3, 4).bfloat16()  # small integers: products and sums are exact
    q, keys = (grid[torch.randint(7, shape)] for shape in ((2, 512, 4, 64), (2, 512 // ratio, 64)))
    weights = torch.randint(-2, 3, (2, 512, 4)).float()
    ours = choice.visible_scores(q, weights, keys, packed, ratio)
    theirs = choice.visible_scores(q.to(GPU), weights.to(GPU), keys.to(GPU), there, ratio)
    assert torch.equal(ours, theirs.cpu())
    for count in (1, 16, 128):  # there are ties
        assert torch.equal(choice.best(ours, count), choice.best(theirs, count).cpu())


def test_experts_and_their_gradients(seed):
    torch.manual_seed(seed)
    x, w1, w3, w2 = torch.randn(300, 64), torch.randn(8, 32, 64) / 8, torch.randn(8, 32, 64) / 8, torch.randn(8, 64, 32) / 6
    expert_ids = torch.rand(300, 6).topk(2).indices  # two experts have no picks
    shares = torch.rand(300, 2)
    results = []
    for device in (torch.device("cpu"), GPU):
        given = [each.to(device, torch.bfloat16).requires_grad_() for each in (x, w1, w3, w2)]
        own = shares.detach().to(device).requires_grad_()
        total = experts.routed(given[0], expert_ids.to(device), own, *given[1:], 10.0)
        total.sum().backward()
        results.append([total.detach().cpu(), *(each.grad.float().cpu() for each in (*given, own))])
    for ours, theirs in zip(*results, strict=True):
        assert theirs.isfinite().all()
        assert (ours - theirs).norm() < 0.03 * ours.norm()
