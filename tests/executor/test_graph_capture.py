"""The layout of rounds is one graph for every total of drafts, because it reads no number on the host."""

import pytest
import torch

from deepinfer.ops.cases import tensors
from deepinfer.ops.sampling import lay_out_rounds

NUM_ROUNDS, NUM_DRAFTS, NUM_ROWS = 64, 5, 256


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "hopper"])
def test_a_replayed_graph_lays_out_any_budget_as_a_fresh_call_does(backend):
    import deepinfer.ops.hopper  # noqa: F401 - needs a kernel library, which only a GPU machine must have

    lay_out = lay_out_rounds.implementations[backend]
    cuda = torch.device("cuda")
    generator = torch.Generator(cuda).manual_seed(0)
    confidences = torch.rand(NUM_ROUNDS, NUM_DRAFTS, device=cuda, generator=generator)
    budget, caps = torch.tensor([100], device=cuda), torch.full((NUM_ROUNDS,), NUM_DRAFTS, device=cuda)
    starts = torch.arange(NUM_ROUNDS, device=cuda) * 1000
    token_ids = torch.randint(100, (NUM_ROUNDS, NUM_DRAFTS + 1), device=cuda, generator=generator)
    arguments = (confidences, budget, caps, starts, token_ids, NUM_ROWS)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        lay_out(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lay_out(*arguments)
    for total in (0, 1, 17, 100, NUM_ROWS - NUM_ROUNDS):  # the same graph for each total
        confidences.copy_(torch.rand(NUM_ROUNDS, NUM_DRAFTS, device=cuda, generator=generator))
        caps.copy_(torch.randint(NUM_DRAFTS + 1, (NUM_ROUNDS,), device=cuda, generator=generator))
        starts += 7
        budget.fill_(total)
        graph.replay()
        expected = lay_out_rounds.reference(*arguments)
        assert all(torch.equal(found, wanted) for found, wanted in zip(tensors(captured), tensors(expected), strict=True))
        assert int(captured.lens.sum()) == min(total, int(caps.sum()))
