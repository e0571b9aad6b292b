"""Muon for the matrices, Adam for all other weights.

Muon moves a matrix along the nearest semi-orthogonal matrix of its momentum, so that all directions of a matrix learn equally
fast.  Stacks of equal matrices make its products a few batched calls.  Embedding, LM head, tables, routers, hyper-connections and
vectors have no such structure and get Adam.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), and the scale 0.2 * sqrt(largest
dimension) of J. Liu et al., "Muon is scalable for LLM training" (2025), with which both groups share one learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_BY_ADAM = ("embed.weight", "head.weight", "gate.weight", "weights_proj.weight", "confidence_head.proj.weight")
_FASTER = {"embed.weight": 10.0, "layers.*.engram.embed.weight": 5.0}
"""Weights that learn at a multiple of the rate: a row has gradients in few steps, and its numbers are large."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_STEPS = 5


class Parameters(Protocol):
    """What the optimiser needs of a model's master weights."""

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    def __getitem__(self, kind: str) -> Tensor:
        """The parameter of a kind; matrices of one kind are stacked."""
        ...

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(kind, parameter) of all."""
        ...


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly semi-orthogonal matrices by five Newton-Schulz steps, which bring singular values to 0.7 to 1.2.

    Args:
        matrices: [..., rows, columns].

    Returns:
        Same shape, bf16.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


class Optimiser:
    """Both rules over the masters of one model.

    Attributes:
        state: kind -> tensors that belong to the weight: ``momentum`` of Muon, ``mean`` and ``square`` of Adam.
        num_steps: [] fp32 taken with this state, on the device of the weights.
    """

    def __init__(
        self,
        masters: Parameters,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        max_norm: float = 1.0,
    ) -> None:
        """Momenta start at zero.

        Args:
            momentum: of Muon, in Nesterov's form.
            betas: of Adam.
            weight_decay: of Muon's matrices, decoupled, relative to the learning rate; other weights have none.
            max_norm: of all gradients together; longer ones are shortened to it.
        """
        self._masters = masters
        self._momentum, self._betas = momentum, betas
        self._weight_decay, self._max_norm = weight_decay, max_norm
        self.num_steps = torch.zeros((), device=masters.device)
        self.state: dict[str, dict[str, Tensor]] = {}
        for kind, value in masters.named():
            if value.requires_grad:
                names = ("momentum",) if self._is_matrix(kind) else ("mean", "square")
                self.state[kind] = {name: torch.zeros_like(value) for name in names}

    def _is_matrix(self, kind: str) -> bool:
        return self._masters[kind].dim() == 3 and not kind.endswith((*_BY_ADAM, "_fn", "q_weight", "k_weight"))

    @torch.no_grad()
    def step(self, rate: Tensor) -> Tensor:
        """Move all weights by their gradients and forget these.

        Args:
            rate: [] fp32 learning rate, on the device, so that a captured step can follow a schedule.

        Returns:
            [] norm of the gradients before shortening.
        """
        gradients = {kind: value.grad for kind, value in self._masters.named() if value.grad is not None}
        norm: Tensor = torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients.values()]))
        torch._foreach_mul_(list(gradients.values()), (self._max_norm / (norm + 1e-6)).clamp_max(1.0))
        self.num_steps += 1
        for kind, gradient in gradients.items():
            self._move(kind, self._masters[kind], gradient, rate)
        for _, value in self._masters.named():
            value.grad = None
        return norm

    def _move(self, kind: str, value: Tensor, gradient: Tensor, rate: Tensor) -> None:
        state = self.state[kind]
        if "momentum" in state:
            average = state["momentum"].lerp_(gradient, 1 - self._momentum)
            direction = orthogonal(gradient.lerp(average, self._momentum))
            value.mul_(1 - rate * self._weight_decay)
            value.sub_(direction * (rate * 0.2 * max(value.shape[-2:]) ** 0.5))
            return
        rate = rate * _FASTER.get(kind, 1.0)
        low, high = self._betas
        mean = state["mean"].lerp_(gradient, 1 - low)
        square = state["square"].lerp_(gradient.square(), 1 - high)
        scale = (square / (1 - high**self.num_steps)).sqrt_().add_(1e-10)
        value.sub_(mean / scale * (rate / (1 - low**self.num_steps)))

    def saved(self) -> dict[str, Any]:
        """What :meth:`restore` needs."""
        return {"num_steps": self.num_steps, "state": self.state}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from :meth:`saved`."""
        self.num_steps.copy_(saved["num_steps"])
        for kind, tensors in saved["state"].items():
            for name, tensor in tensors.items():
                self.state[kind][name].copy_(tensor)
