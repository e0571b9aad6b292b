"""Features of the pictures of unfinished requests.

A picture is encoded when a chunk first needs it.  All answers to the same prompt share its features.

Invariant: the features of a picture depend on its pixels alone.  The time of encoding and the other requests change no bit.
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
    """The features of all image positions of a list of pictures, in the order of the pictures.

    Pixels stay on the host and features stay on the device until the object is dropped, because a preempted request needs them
    again.
    """

    def __init__(self, pictures: Sequence[Picture], tower: VisionTower) -> None:
        """Keep the pictures without encoding them; ``pictures`` are in the order of their spans in the prompt."""
        self.pictures = tuple(pictures)
        self.num_holders = 0
        self._tower = tower
        self._starts = (0, *itertools.accumulate(each.plan.span_tokens for each in self.pictures))
        self._is_encoded = [False] * len(self.pictures)
        self._features: Tensor | None = None

    def covering(self, first: int, count: int) -> Tensor:
        """Features [num_image_positions, hidden_size] of all image positions; at least [first, first + count) are computed.

        Cost: one run of the tower for each picture in the range that is not encoded yet; no wait for the device.
        """
        for number, (start, end) in enumerate(itertools.pairwise(self._starts)):
            if start < first + count and first < end and not self._is_encoded[number]:
                picture = self.pictures[number]
                span = self._tower.span(to_device(torch.from_numpy(picture.pixels), self._tower.device), picture.plan.tokens_w)
                if self._features is None:
                    self._features = span.new_empty(self._starts[-1], span.shape[1])
                self._features[start:end] = span
                self._is_encoded[number] = True
        assert self._features is not None, "the range contains an image position"
        return self._features


class Gallery:
    """The features of all unfinished requests; requests with the same picture objects share them."""

    def __init__(self, tower: VisionTower) -> None:
        """Start without features."""
        self._tower = tower
        self._features: dict[tuple[int, ...], Features] = {}  # by id() of the pictures, which live as long as the entry

    def take(self, pictures: Sequence[Picture]) -> Features:
        """The features of ``pictures``; call :meth:`give_back` when they are not needed any more."""
        key = tuple(map(id, pictures))
        features = self._features.setdefault(key, Features(pictures, self._tower))
        features.num_holders += 1
        return features

    def give_back(self, features: Features) -> None:
        """Release ``features``; the last release drops them."""
        features.num_holders -= 1
        if not features.num_holders:
            del self._features[tuple(map(id, features.pictures))]
