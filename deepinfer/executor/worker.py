"""One rank: device, model, caches.  Runs plans; knows nothing of queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.executor.sample import sample_rows
from deepinfer.images import ImagePlan
from deepinfer.kv.cache import KVCache
from deepinfer.kv.layout import KVLayout
from deepinfer.model.flash import Flash
from deepinfer.model.inputs import StepInputs
from deepinfer.model.vision import VisionTower
from deepinfer.request import SamplingParams
from deepinfer.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image of a request, ready for the vision tower.

    Attributes:
        plan: its size in pixels and tokens.
        pixels: [3, height, width] float32 in [-1, 1].
    """

    plan: ImagePlan
    pixels: np.ndarray


@dataclass(slots=True, kw_only=True)
class _Row:
    """What the device side remembers of an unfinished request."""

    params: SamplingParams
    num_prompt: int
    image_features: Tensor | None = field(default=None)


class Worker:
    """Owns the tensors of one rank.

    Attributes:
        layout: of the caches.
        num_pages, num_slots: of the caches, including page 0 and slot 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: Flash,
        tower: VisionTower | None,
        layout: KVLayout,
        *,
        num_pages: int,
        num_slots: int,
    ) -> None:
        """Allocate the caches beside ``model`` on its device."""
        self.config = config
        self.model = model
        self.tower = tower
        self.layout = layout
        self.num_pages = num_pages
        self.num_slots = num_slots
        self._cache = KVCache(layout, num_pages=num_pages, num_slots=num_slots, device=model.device)
        self._rows: dict[str, _Row] = {}

    @torch.inference_mode()
    def add(self, request_id: str, params: SamplingParams, num_prompt: int, pictures: Sequence[Picture] = ()) -> None:
        """Remember an unfinished request and encode its pictures.

        Args:
            num_prompt: tokens of its prompt.
            pictures: in the order of their spans in the prompt.
        """
        features = None
        if pictures:
            assert self.tower is not None, "pictures are accepted only with a vision tower"
            encoded = [self.tower.span(torch.from_numpy(each.pixels), each.plan.tokens_w) for each in pictures]
            features = torch.cat(encoded)
        self._rows[request_id] = _Row(params=params, num_prompt=num_prompt, image_features=features)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        del self._rows[request_id]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one step: extend the caches by its tokens and sample where logits were asked for."""
        features = {
            chunk.request_id: row.image_features
            for chunk in plan.chunks
            if (row := self._rows[chunk.request_id]).image_features is not None
        }
        inputs = StepInputs.build(plan, config=self.config, layout=self.layout, device=self.model.device, image_features=features)
        logits = self.model.forward(inputs, self._cache)
        wanted = [chunk for chunk in plan.chunks if chunk.num_logits]
        if not wanted:
            return StepResult(sampled={})
        rows = [self._rows[chunk.request_id] for chunk in wanted]
        positions = [chunk.start + len(chunk.token_ids) for chunk in wanted]
        num_outputs = [position - row.num_prompt for position, row in zip(positions, rows, strict=True)]
        sampled = sample_rows(
            logits,
            [row.params for row in rows],
            positions,
            num_outputs,
            eos_token_id=self.config.eos_token_id,
            forbidden=(self.config.image_token_id,),
        )
        return StepResult(sampled={chunk.request_id: each for chunk, each in zip(wanted, sampled, strict=True)})
