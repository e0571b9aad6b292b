"""One rank: device, model, caches.  Launches plans; knows nothing of queues."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.executor.rows import RowTable
from deepinfer.executor.sample import SampledRows, Vocabulary, launch_sampling
from deepinfer.images import ImagePlan
from deepinfer.kv.cache import KVCache
from deepinfer.kv.layout import KVLayout
from deepinfer.model.flash import Flash
from deepinfer.model.inputs import ReplayMode, StepInputs
from deepinfer.model.vision import VisionTower
from deepinfer.ops.quant import to_device
from deepinfer.request import SamplingParams
from deepinfer.step import PLACEHOLDER, Chunk, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image of a request, ready for the vision tower.

    Attributes:
        plan: its size in pixels and tokens.
        pixels: [3, height, width] float32 in [-1, 1].
    """

    plan: ImagePlan
    pixels: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the worker remembers of an unfinished request."""

    params: SamplingParams
    num_prompt: int
    image_features: Tensor | None


class Launched:
    """A step on its way; :meth:`result` waits for it."""

    def __init__(self, chunks: Sequence[Chunk], params: Sequence[SamplingParams], rows: SampledRows | None) -> None:
        self._request_ids = [chunk.request_id for chunk in chunks]
        self._params = params
        self._rows = rows

    def result(self) -> StepResult:
        """Tokens of the chunks that asked for logits."""
        sampled = self._rows.read(self._params) if self._rows is not None else []
        return StepResult(sampled=dict(zip(self._request_ids, sampled, strict=True)))


class Worker:
    """Owns the tensors of one rank.

    Invariant: between steps, what a slot or page holds belongs to the request that the planner gave it to.

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
        replay_mode: ReplayMode = "compact",
        guard_syncs: bool = True,
    ) -> None:
        """Allocate the caches beside ``model`` on its device.

        Args:
            replay_mode: how rows in front of a decoder floor are kept out of the decoder half.
            guard_syncs: whether a launch that waits for a GPU is an error.
        """
        self.config = config
        self.model = model
        self.tower = tower
        self.layout = layout
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.replay_mode: ReplayMode = replay_mode
        self._guard_syncs = guard_syncs and model.device.type == "cuda"
        if self._guard_syncs:
            with warnings.catch_warnings():  # torch says once that this mode is young; nobody can act on it
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
                torch.cuda.set_sync_debug_mode("default")
        self._cache = KVCache(layout, num_pages=num_pages, num_slots=num_slots, device=model.device)
        self._rows = RowTable(num_slots, model.device)
        self._vocabulary = Vocabulary.build(
            config.vocab_size, eos_token_id=config.eos_token_id, forbidden=(config.image_token_id,), device=model.device
        )
        self._known: dict[str, _Known] = {}
        self._owners: dict[int, str] = {}  # slot -> request whose row it holds

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
        self._known[request_id] = _Known(params=params, num_prompt=num_prompt, image_features=features)

    def remove(self, request_id: str) -> None:
        """Forget a request; its id may be used again."""
        del self._known[request_id]
        self._owners = {slot: owner for slot, owner in self._owners.items() if owner != request_id}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start one step: copies, forward pass, sampling.  Does not wait for a GPU."""
        if not self._guard_syncs:
            return self._launch(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _launch(self, plan: StepPlan) -> Launched:
        restores = [(chunk.restore_from, chunk.slot) for chunk in plan.chunks if chunk.restore_from is not None]
        self._cache.copy_pages(plan.page_copies)
        self._cache.copy_slots(restores)
        features = {}
        for chunk in plan.chunks:
            if chunk.request_id == PLACEHOLDER:
                continue
            known = self._known[chunk.request_id]
            if self._owners.get(chunk.slot) != chunk.request_id:
                self._rows.write(chunk.slot, known.params, known.num_prompt)
                self._owners[chunk.slot] = chunk.request_id
            if known.image_features is not None:
                features[chunk.request_id] = known.image_features
        inputs = StepInputs.build(
            plan,
            config=self.config,
            layout=self.layout,
            device=self.model.device,
            image_features=features,
            last_tokens=self._rows.last_tokens,
            replay_mode=self.replay_mode,
        )
        logits = self.model.forward(inputs, self._cache)
        self._cache.copy_slots([(chunk.slot, chunk.save_to) for chunk in plan.chunks if chunk.save_to is not None])
        wanted = [chunk for chunk in plan.chunks if chunk.num_logits]
        if not wanted:
            return Launched([], [], None)
        params = [self._known[chunk.request_id].params for chunk in wanted]
        numbers = torch.tensor([[chunk.slot for chunk in wanted], [chunk.end for chunk in wanted]], dtype=torch.int64)
        slots, positions = to_device(numbers, self.model.device)
        return Launched(wanted, params, launch_sampling(logits, params, slots, positions, self._rows, self._vocabulary))
