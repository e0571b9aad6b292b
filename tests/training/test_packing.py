"""Documents share sequences and see nothing of each other."""

import numpy as np
import pytest
import torch

from training.packing import Packed, Sight, pack


@pytest.mark.parametrize("align", [1, 8])
def test_every_document_is_packed_once_and_fits(seed, align):
    lengths = np.random.default_rng(seed).integers(1, 129, 500)
    sequences = pack(lengths, 256, align)
    assert sorted(number for each in sequences for number in each) == list(range(500))
    taken = [sum(-(-int(lengths[number]) // align) * align for number in each) for each in sequences]
    assert max(taken) <= 256
    assert sum(taken) / (256 * len(sequences)) > 0.98


def random_batch(seed, *, num_sequences, length, align):
    rng = np.random.default_rng(seed)
    positions = torch.full((num_sequences, length), -1)
    for row in range(num_sequences):
        first = 0
        while first < length:
            count = min(int(rng.integers(1, 200)), length - first)
            positions[row, first : first + count] = torch.arange(count)
            first += -(-count // align) * align
    return Packed(torch.zeros_like(positions), positions)


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_blocks_of_the_kernel_cover_all_that_is_visible(seed, ratio, is_sparse):
    batch = random_batch(seed, num_sequences=3, length=512, align=8)
    chosen = None
    if is_sparse and ratio:
        chosen = Sight(batch, ratio, 128).all_rows()[..., 512:] & (torch.rand(3, 512, 512 // ratio) < 0.3)
    sight = Sight(batch, ratio, 128, chosen)
    visible = sight.all_rows()[batch.positions >= 0]
    dense = sight.blocks.to_dense().bool()[:, 0]
    covered = dense.repeat_interleave(128, 1).repeat_interleave(128, 2)[batch.positions >= 0]
    assert not (visible & ~covered).any()
    assert visible.any(1).all()


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_token_sees_its_own_document_up_to_itself(seed, ratio):
    batch = random_batch(seed, num_sequences=1, length=256, align=8)
    visible = Sight(batch, ratio, 32).all_rows()[0]
    positions = batch.positions[0]
    for token in range(256):
        if positions[token] < 0:
            continue
        first = token - int(positions[token])
        window = list(range(max(first, token - 31), token + 1))
        entries = [256 + entry for entry in range(first // ratio, (token + 1) // ratio)] if ratio else []
        assert visible[token].nonzero().flatten().tolist() == window + entries


def test_targets_end_with_their_document():
    positions = torch.tensor([[0, 1, 2, -1, 0, 1, -1, -1]])
    batch = Packed(torch.arange(8).view(1, -1), positions)
    assert batch.targets.tolist() == [[1, 2, -100, -100, 5, -100, -100, -100]]
