"""The dense transformer of the comparison."""

import dataclasses

import pytest
import torch

from deepinfer.config import named_config
from training.dense import DenseMasters, DenseTrainer, hidden_states
from training.packing import Packed
from training.train import Recipe

CONFIG = dataclasses.replace(named_config("golden"), hidden_size=128)


def test_documents_do_not_see_each_other(seed):
    torch.manual_seed(seed)
    masters = DenseMasters(CONFIG, 1)
    token_ids = torch.randint(3, 250, (1, 96))
    together = hidden_states(masters, Packed(token_ids, torch.cat([torch.arange(40), torch.arange(56)])[None]), torch.float32)
    alone = hidden_states(masters, Packed(token_ids[:, 40:], torch.arange(56)[None]), torch.float32)
    assert torch.allclose(together[40:], alone, atol=1e-5)
    token_ids[0, 90] += 1
    changed = hidden_states(masters, Packed(token_ids[:, 40:], torch.arange(56)[None]), torch.float32)
    assert torch.equal(changed[:50], alone[:50])
    assert not torch.equal(changed[50:], alone[50:])


def test_it_learns():
    recipe = Recipe(num_tokens=40 * 128, batch=1, length=128)
    trainer = DenseTrainer(CONFIG, recipe, torch.device("cpu"), torch.float32, is_eager=True)
    packed = Packed(torch.arange(128).remainder(8)[None] + 3, torch.arange(128)[None])
    losses = [float(trainer.step(packed)["loss"]) for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # as in test_kernels.py
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_recorded_steps_are_the_launched_ones():
    recipe = Recipe(num_tokens=40 * 512, batch=2, length=256)
    packed = Packed(torch.arange(512).remainder(8).view(2, 256).cuda() + 3, torch.arange(256).repeat(2, 1).cuda())
    losses = []
    for is_eager in (True, False):
        trainer = DenseTrainer(CONFIG, recipe, torch.device("cuda"), torch.bfloat16, is_eager=is_eager)
        losses.append([float(trainer.step(packed)["loss"]) for _ in range(8)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
