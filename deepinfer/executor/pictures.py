"""Pictures of unfinished requests: encoded when a chunk first needs them, once for all answers that show them.

Invariant: what a picture is encoded to is a function of its pixels alone, so when and for whom it is encoded changes no bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.images import Picture
from deepinfer.model.vision import VisionTower
from deepinfer.ops.arithmetic import to_device


class Features:
    """What the image positions of a list of pictures show, picture after picture.

    Pixels stay on the host and features on the device until the object is dropped: a request that was preempted needs them again.
    """

    def __init__(self, pictures: Sequence[Picture], tower: VisionTower) -> None:
        """Nothing encoded yet; ``pictures`` in the order of their spans in the prompt."""
        self.pictures = tuple(pictures)
        self.num_holders = 0
        self._tower = tower
        self._starts = (0, *itertools.accumulate(each.plan.span_tokens for each in self.pictures))
        self._is_encoded = [False] * len(self.pictures)
        self._rows: Tensor | None = None

    def covering(self, first: int, count: int) -> Tensor:
        """Rows of all image positions, of which [first, first + count) are filled in: [num_image_positions, hidden_size].

        Cost: a run of the tower for each picture that is touched for the first time; no wait for the device.
        """
        for number, (start, end) in enumerate(itertools.pairwise(self._starts)):
            if start < first + count and first < end and not self._is_encoded[number]:
                picture = self.pictures[number]
                span = self._tower.span(to_device(torch.from_numpy(picture.pixels), self._tower.device), picture.plan.tokens_w)
                if self._rows is None:
                    self._rows = span.new_empty(self._starts[-1], span.shape[1])
                self._rows[start:end] = span
                self._is_encoded[number] = True
        assert self._rows is not None, "image positions were asked for"
        return self._rows


class Gallery:
    """The features of all unfinished requests, shared by those that were handed the same pictures."""

    def __init__(self, tower: VisionTower) -> None:
        """Empty."""
        self._tower = tower
        self._features: dict[tuple[int, ...], Features] = {}  # the identities of pictures, which stay theirs while they are here

    def take(self, pictures: Sequence[Picture]) -> Features:
        """The features of ``pictures``; to be given back."""
        key = tuple(map(id, pictures))
        features = self._features.setdefault(key, Features(pictures, self._tower))
        features.num_holders += 1
        return features

    def give_back(self, features: Features) -> None:
        """One holder less; nothing is kept without holders."""
        features.num_holders -= 1
        if not features.num_holders:
            del self._features[tuple(map(id, features.pictures))]
