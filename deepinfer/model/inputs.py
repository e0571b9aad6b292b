"""StepInputs: what every layer receives, as an argument.

Made once a step from its plan.  Host numbers become a few small device tensors; everything else is derived from them on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.kv.layout import KVLayout
from deepinfer.ops.attention import Span
from deepinfer.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRows:
    """Where the tokens of a step write their compressed entries, for one compress ratio.

    Attributes:
        pages, entries: [num_tokens] int64; page 0 for tokens that complete no entry.
        first_positions: [num_tokens] int64, first token position of each token's entry.
    """

    pages: Tensor
    entries: Tensor
    first_positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step, seen by the model.  Requests are numbered 0 … num_requests-1 in the order of their rows.

    Attributes:
        token_ids, positions: [num_tokens] int64.
        requests: [num_tokens] int64, whose token a row is.
        is_image: [num_tokens] bool.
        image_rows: [num_image_rows] int64 rows whose embedding comes from the vision tower, or None.
        image_embeddings: [num_image_rows, hidden], or None.
        spans: per request, on the host.
        slots, starts: [num_requests] int64.
        page_ids: [num_step_pages] int64, the requests' pages one behind the other.
        logit_rows: [num_logits] int64 rows that need logits.
        window_rows: [num_tokens, sliding_window] int64: row of each visible window key among [sliding_window - 1 earlier keys of
            each request | this step's keys], -1 where there is none.
        earlier_positions: [num_requests, sliding_window - 1] int64, the positions those earlier keys have (negative: none).
        ring_rows, compressor_rows, lookback_rows: [n] int64, rows whose state must outlive the step in each kind of ring.
        store_rows: compress ratio -> addresses.
    """

    token_ids: Tensor
    positions: Tensor
    requests: Tensor
    is_image: Tensor
    image_rows: Tensor | None
    image_embeddings: Tensor | None
    spans: tuple[Span, ...]
    slots: Tensor
    starts: Tensor
    page_ids: Tensor
    logit_rows: Tensor
    window_rows: Tensor
    earlier_positions: Tensor
    ring_rows: Tensor
    compressor_rows: Tensor
    lookback_rows: Tensor
    store_rows: Mapping[int, StoreRows]

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        *,
        config: ModelConfig,
        layout: KVLayout,
        device: torch.device,
        image_features: Mapping[str, Tensor] | None = None,
    ) -> StepInputs:
        """Inputs of ``plan`` on ``device``.

        Args:
            image_features: request id -> [num_image_positions, hidden] embeddings of all its image positions, in order.
        """
        spans: list[Span] = []
        first_row = first_page = 0
        for chunk in plan.chunks:
            num_rows, num_pages = len(chunk.token_ids), len(chunk.page_ids)
            assert num_rows > 0, "a chunk has tokens"
            assert num_pages >= layout.pages_for(chunk.start + num_rows), "pages cover the chunk"
            spans.append(
                Span(first_row=first_row, num_rows=num_rows, start=chunk.start, first_page=first_page, num_pages=num_pages)
            )
            first_row += num_rows
            first_page += num_pages

        def put(values: np.ndarray | list[int]) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

        def tail(length: int) -> Tensor:
            """Rows of the last ``length`` tokens of each request: what a ring of that length keeps."""
            ends = [(span.first_row + span.num_rows, min(length, span.num_rows)) for span in spans]
            return put(np.concatenate([np.arange(end - count, end) for end, count in ends]))

        token_ids = np.concatenate([chunk.token_ids for chunk in plan.chunks])
        requests = put(np.repeat(np.arange(len(spans)), [span.num_rows for span in spans]))
        positions = put(np.concatenate([np.arange(span.start, span.start + span.num_rows) for span in spans]))
        starts = put([span.start for span in spans])
        first_rows, first_pages = put([span.first_row for span in spans]), put([span.first_page for span in spans])
        page_ids = put(np.concatenate([chunk.page_ids for chunk in plan.chunks]))

        image_rows = image_embeddings = None
        is_image = token_ids == config.image_token_id
        if is_image.any():
            assert image_features is not None, "image positions have features"
            parts = []
            for chunk, span in zip(plan.chunks, spans, strict=True):
                count = int(is_image[span.first_row : span.first_row + span.num_rows].sum())
                if count:
                    parts.append(image_features[chunk.request_id][chunk.num_image_before : chunk.num_image_before + count])
            image_rows = put(np.flatnonzero(is_image))
            image_embeddings = torch.cat(parts)

        # Window keys: the earlier ones of each request, then the step's own.
        reach = config.sliding_window - 1
        start, first = starts[requests].unsqueeze(1), first_rows[requests].unsqueeze(1)
        key_positions = positions.unsqueeze(1) + torch.arange(-reach, 1, device=device)
        own = len(spans) * reach + first + key_positions - start
        earlier = requests.unsqueeze(1) * reach + key_positions - start + reach
        window_rows = torch.where(key_positions >= start, own, earlier).masked_fill_(key_positions < 0, -1)

        store_rows = {}
        for ratio in {config.ratio(layer) for layer in config.kv_source_layer_ids}:
            page_entries = layout.page_tokens // ratio
            numbers = positions // ratio
            pages = page_ids[first_pages[requests] + numbers // page_entries]
            store_rows[ratio] = StoreRows(
                pages=torch.where((positions + 1) % ratio == 0, pages, 0),
                entries=numbers % page_entries,
                first_positions=numbers * ratio,
            )

        wanted = [
            np.arange(s.first_row + s.num_rows - c.num_logits, s.first_row + s.num_rows)
            for s, c in zip(spans, plan.chunks, strict=True)
        ]
        return cls(
            token_ids=put(token_ids),
            positions=positions,
            requests=requests,
            is_image=torch.from_numpy(is_image).to(device),
            image_rows=image_rows,
            image_embeddings=image_embeddings,
            spans=tuple(spans),
            slots=put([chunk.slot for chunk in plan.chunks]),
            starts=starts,
            page_ids=page_ids,
            logit_rows=put(np.concatenate(wanted)),
            window_rows=window_rows,
            earlier_positions=starts.unsqueeze(1) + torch.arange(-reach, 0, device=device),
            ring_rows=tail(layout.ring_tokens),
            compressor_rows=tail(layout.compressor_ring),
            lookback_rows=tail(layout.lookback_ring),
            store_rows=store_rows,
        )
