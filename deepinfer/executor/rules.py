"""Rules about tokens, request by request: bias, penalties, what is allowed, what is forced.

Everything that changes a row of logits before temperature and filters lives here.  A rule is evaluated at each packed row of its
request as if the drafts in front of that row had been emitted; only tokens that were emitted for good enter the counts.

Invariant: a request's rows depend on its own parameters, text and drafts alone.  Nothing here waits for the device.

Cost: memory and time only for requests that use a rule, one row of the vocabulary each while they hold a slot: 4 bytes a token
for a bias, 5 for penalties, 1 for a mask (:func:`rules_bytes`).  A step without such requests gets its logits and the engine's
own mask back as they are.  Temporaries stay within the bound of ``ops.sampling``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.ops.arithmetic import accumulation_dtype, to_device
from deepinfer.ops.sampling import parts_of, penalise, row_bytes
from deepinfer.request import SamplingParams

_RULE_BYTES = 4 + 4 + 1 + 1
"""Bytes of a bias, counts, what the prompt has seen, and a mask, for each id."""


def rules_bytes(vocab_size: int, *, num_requests: int, num_rows: int, element_size: int) -> int:
    """Most bytes that rules take beside their bounded temporaries.

    vocab_size x (num_requests x 10 x 2, tables of bias, counts and masks, which grow by doubling, + num_requests x 4, the one
    that grows, + (num_rows + 1) x (element_size + 1), logits that are changed and a mask for each).

    Args:
        num_requests: that run at once.
        num_rows: of logits in a step.
        element_size: bytes of a logit.
    """
    tables = num_requests * (2 * _RULE_BYTES + 4)
    return vocab_size * (tables + (num_rows + 1) * (element_size + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Whose the rows of a step's logits are.

    Attributes:
        request_ids: on the host, in the order in which they own rows; unknown ones have no rules.
        owners: [num_logits] int64, index into request_ids; padding rows, all behind the last request's, name any.
        offsets: [num_logits] int64, 0 at the row of the anchor, j at the row of draft j; anything at padding rows.
        positions: [num_logits] int64, decided positions.
        draft_ids: [num_requests, width] int64, -1 = no draft.
    """

    request_ids: Sequence[str]
    owners: Tensor
    offsets: Tensor
    positions: Tensor
    draft_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What is known of one request's rules.

    Attributes:
        params: its parameters.
        num_prompt: tokens of its prompt.
        bias, history, mask: its row in the table of that name, or None if it needs none.
        golden: [length] int64 on the device, the forced tokens; None without.
        eos_from: first position where the end token may stand.
    """

    params: SamplingParams
    num_prompt: int
    bias: int | None
    history: int | None
    mask: int | None
    golden: Tensor | None
    eos_from: int

    @property
    def has_mask(self) -> bool:
        return self.mask is not None or self.golden is not None or self.eos_from > self.num_prompt


class _Table:
    """Device tensors with one row of the vocabulary for each request that needs one.

    Attributes:
        tensors: [capacity, vocab_size] each.
    """

    def __init__(self, vocab_size: int, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.tensors = [torch.zeros(0, vocab_size, dtype=dtype, device=device) for dtype in dtypes]
        self._free: list[int] = []

    def take(self) -> int:
        """A row with anything in it."""
        if not self._free:
            capacity = len(self.tensors[0])
            more = max(4, capacity)
            self._free = list(range(capacity + more - 1, capacity - 1, -1))
            self.tensors = [torch.cat([each, each.new_zeros(more, each.shape[1])]) for each in self.tensors]
        return self._free.pop()

    def give_back(self, row: int | None) -> None:
        if row is not None:
            self._free.append(row)


class TokenRules:
    """The rules of all unfinished requests.

    Call :meth:`add` once a request, :meth:`start` whenever it gets a slot, :meth:`stop` when it has lost it, then for each step
    :meth:`apply` and, with what was emitted, :meth:`record`.

    Invariant: the counts of a request that runs are those of its emitted tokens.  One that waits holds no row of any table.
    """

    def __init__(self, vocab_size: int, *, eos_token_id: int, forbidden: Sequence[int], device: torch.device) -> None:
        """No requests yet; ``forbidden`` ids are never sampled for any of them, unless they are forced."""
        self._device = device
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        allowed = torch.ones(vocab_size, dtype=torch.bool)
        allowed[list(forbidden)] = False
        self._allowed_on_host = allowed
        self._allowed = to_device(allowed, device)
        self._known: dict[str, tuple[SamplingParams, int]] = {}  # parameters and tokens of the prompt
        self._rules: dict[str, _Rule] = {}  # only of requests that run and have any
        self._biases = _Table(vocab_size, [torch.float32], device)
        self._histories = _Table(vocab_size, [torch.int32, torch.bool], device)  # output counts, prompt seen
        self._masks = _Table(vocab_size, [torch.bool], device)

    def add(self, request_id: str, params: SamplingParams, num_prompt: int) -> None:
        """Remember a request whose prompt has ``num_prompt`` tokens.  Every id must be inside the vocabulary."""
        self._known[request_id] = params, num_prompt

    def _take(self, params: SamplingParams, num_prompt: int) -> _Rule:
        """Rows of the tables for a request, filled in."""
        allowed = self._allowed_on_host.clone()
        if params.allowed_token_ids is not None:
            allowed &= torch.zeros_like(allowed).index_fill_(0, torch.tensor(params.allowed_token_ids), True)
        allowed.index_fill_(0, torch.tensor(params.banned_token_ids, dtype=torch.int64), False)
        if not bool(allowed.any()):
            allowed[self._eos_token_id] = True  # the engine forbids all that the request allows: it may only end
        eos_from = num_prompt + params.first_n_token_no_eos
        if int(allowed.sum()) == int(allowed[self._eos_token_id]):
            eos_from = num_prompt  # holding the end token back would leave nothing
        mask = bias = history = golden = None
        if params.has_token_mask:
            mask = self._masks.take()
            self._masks.tensors[0][mask] = to_device(allowed, self._device)
        if params.bias_pairs:
            bias = self._biases.take()
            ids, biases = zip(*params.bias_pairs, strict=True)
            values = torch.zeros(self._vocab_size).index_copy_(0, torch.tensor(ids), torch.tensor(biases))
            self._biases.tensors[0][bias] = to_device(values, self._device)
        if params.needs_history:
            history = self._histories.take()
        if params.golden_token_ids is not None:
            # Steps copy these; an answer has no more of them than tokens.
            golden = to_device(torch.tensor(params.golden_token_ids[: params.max_tokens]), self._device)
        return _Rule(
            params=params, num_prompt=num_prompt, bias=bias, history=history, mask=mask, golden=golden, eos_from=eos_from
        )

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._known.pop(request_id, None)
        self.stop(request_id)

    def stop(self, request_id: str) -> None:
        """Give the rows of a request back, which has to be started before it runs again."""
        rule = self._rules.pop(request_id, None)
        if rule is not None:
            self._biases.give_back(rule.bias)
            self._histories.give_back(rule.history)
            self._masks.give_back(rule.mask)

    def start(self, request_id: str, token_ids: npt.NDArray[np.int32] | None = None) -> None:
        """Take rows for a request that has none, and count its text from scratch.

        Args:
            token_ids: [num_tokens] all tokens that it has, first those of the prompt, then the output's; None leaves the counts
                alone, for a request without ``params.needs_history`` and between its steps.
        """
        rule = self._rules.get(request_id)
        if rule is None:
            rule = self._take(*self._known[request_id])
            if not (rule.has_mask or rule.bias is not None or rule.history is not None):
                return
            self._rules[request_id] = rule
        if rule.history is None or token_ids is None:
            return
        counts, seen = (each[rule.history] for each in self._histories.tensors)
        ids = to_device(torch.from_numpy(token_ids.astype(np.int64)), self._device)
        prompt, output = ids[: rule.num_prompt], ids[rule.num_prompt :]
        counts.zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        seen.zero_().index_fill_(0, prompt, True)

    def apply(self, logits: Tensor, packed: PackedRows) -> tuple[Tensor, Tensor]:
        """The logits of a step under its requests' rules, and which tokens may be chosen.

        Args:
            logits: [num_logits, vocab_size] as the model made them; not changed.
            packed: whose they are.

        Returns:
            logits: the same object if no request of the step has a bias or penalties; else [num_logits, vocab_size] fp32 (fp64
                for fp64 logits).
            mask: bool, True = allowed, at least one a row: [vocab_size] if no request of the step has a rule about it, else
                [num_logits, vocab_size].
        """
        present = [(i, self._rules[name]) for i, name in enumerate(packed.request_ids) if name in self._rules]
        if not present:
            return logits, self._allowed
        rows = _Rows(packed, self._device)
        biased = [(i, rule.bias) for i, rule in present if rule.bias is not None]
        penalised = [(i, rule) for i, rule in present if rule.history is not None]
        masked = [(i, rule) for i, rule in present if rule.has_mask]
        if biased or penalised:
            # One row more, for what belongs to rows that are not there.
            logits = torch.cat([logits, logits.new_zeros(1, logits.shape[1])]).to(accumulation_dtype(logits))
        num_bytes = rows.height * row_bytes(self._vocab_size, logits.dtype)
        for part in parts_of(len(biased), num_bytes) if biased else ():
            owners, tables = self._columns(biased[part])
            where = rows.of(owners)
            changed = logits[where].unflatten(0, (len(owners), -1)) + self._biases.tensors[0][tables].unsqueeze(1)
            logits.index_copy_(0, where, changed.flatten(0, 1))
        for part in parts_of(len(penalised), num_bytes) if penalised else ():
            self._penalise(logits, penalised[part], rows)
        if biased or penalised:
            logits = logits[:-1]
        if not masked:
            return logits, self._allowed
        mask = self._allowed.repeat(rows.num_logits + 1, 1)
        for part in parts_of(len(masked), num_bytes):
            self._mask(mask, masked[part], rows)
        return logits, mask[:-1]

    def record(self, request_ids: Sequence[str], emitted: Tensor) -> None:
        """Count what a step has emitted.

        Args:
            request_ids: on the host.
            emitted: [num_requests, width + 1] int64, -1 = none.
        """
        present = [(i, rule.history) for i, name in enumerate(request_ids) if (rule := self._rules.get(name)) is not None]
        counted = [(i, history) for i, history in present if history is not None]
        if not counted:
            return
        owners, tables = self._columns(counted)
        tokens = emitted[owners]
        counts = self._histories.tensors[0]
        flat = tables.unsqueeze(1) * self._vocab_size + tokens.clamp_min(0)
        counts.view(-1).scatter_add_(0, flat.flatten(), (tokens >= 0).int().flatten())

    def _columns(self, numbers: Iterable[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """Columns of whole numbers as int64 on the device, in one copy."""
        return to_device(torch.tensor(list(numbers), dtype=torch.int64).t().contiguous(), self._device).unbind(0)

    def _penalise(self, logits: Tensor, penalised: Sequence[tuple[int, _Rule]], rows: _Rows) -> None:
        """Penalties on the rows of ``penalised`` requests, in place."""
        owners, tables = self._columns((i, rule.history) for i, rule in penalised if rule.history is not None)
        values = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (rule.params for _, rule in penalised)]
        repetition, frequency, presence = to_device(
            torch.tensor(values, dtype=torch.float32).repeat_interleave(rows.height, 0).t().contiguous(), self._device
        )
        counts, seen = (each[tables] for each in self._histories.tensors)
        # [num_penalised, height, vocab_size]: at row j the drafts up to j are output, too.
        drafts = rows.draft_ids[owners]
        slots = torch.arange(rows.height, device=self._device)
        is_before = (slots[1:] <= slots.unsqueeze(1)) & (drafts >= 0).unsqueeze(1)
        counts = counts.unsqueeze(1).repeat(1, rows.height, 1)
        counts.scatter_add_(2, drafts.clamp_min(0).unsqueeze(1).expand(is_before.shape), is_before.int())
        where = rows.of(owners)
        changed = penalise(
            logits[where],
            counts.flatten(0, 1),
            seen.unsqueeze(1).expand(-1, rows.height, -1).flatten(0, 1),
            repetition,
            frequency,
            presence,
        )
        logits.index_copy_(0, where, changed)

    def _mask(self, mask: Tensor, masked: Sequence[tuple[int, _Rule]], rows: _Rows) -> None:
        """Write what the rows of ``masked`` requests may choose from into ``mask`` [num_logits + 1, vocab_size] bool."""
        tables = [-1 if rule.mask is None else rule.mask for _, rule in masked]
        forced = [rule.golden for _, rule in masked if rule.golden is not None]
        lens = [0 if rule.golden is None else len(rule.golden) for _, rule in masked]
        starts = np.cumsum([0, *lens[:-1]]).tolist()
        owners, table, eos_from, num_prompt, length, start = self._columns(
            (i, row, rule.eos_from, rule.num_prompt, count, first)
            for (i, rule), row, count, first in zip(masked, tables, lens, starts, strict=True)
        )
        allowed = self._allowed.expand(len(masked), -1)
        if any(row >= 0 for row in tables):
            allowed = torch.where(table.unsqueeze(1) < 0, allowed, self._masks.tensors[0][table.clamp_min(0)])
        where = rows.of(owners)
        positions = rows.positions[where].view(len(masked), -1)
        token_ids = torch.arange(self._vocab_size, device=self._device)
        is_held_back = (positions < eos_from.unsqueeze(1)).unsqueeze(2) & (token_ids == self._eos_token_id)
        allowed = allowed.unsqueeze(1) & ~is_held_back
        if forced:
            idx = positions - num_prompt.unsqueeze(1)
            is_forced = (idx >= 0) & (idx < length.unsqueeze(1))
            flat = torch.cat(forced)
            at = torch.where(is_forced, start.unsqueeze(1) + idx, 0)
            allowed = torch.where(is_forced.unsqueeze(2), token_ids == flat[at].unsqueeze(2), allowed)
        mask.index_copy_(0, where, allowed.flatten(0, 1))


class _Rows:
    """Packed rows as a rectangle: every request has ``height`` = width + 1 of them, some of which are not there.

    Attributes:
        height: rows of one request.
        num_logits: rows in all; the row of that number stands for rows that are not there.
        positions: [num_logits + 1] int64, decided positions.
        draft_ids: [num_requests, width] int64.
    """

    def __init__(self, packed: PackedRows, device: torch.device) -> None:
        num_requests, width = packed.draft_ids.shape
        self.height, self.num_logits = width + 1, packed.owners.shape[0]
        self.draft_ids = packed.draft_ids
        self.positions = torch.nn.functional.pad(packed.positions, (0, 1))
        cells = num_requests * self.height
        numbers = torch.arange(self.num_logits, device=device)
        cell = torch.where(packed.offsets < self.height, packed.owners * self.height + packed.offsets, cells)
        # The first row wins, because padding may name a cell that has a row.
        dense = torch.full((cells + 1,), self.num_logits, device=device)
        dense.scatter_reduce_(0, cell.clamp(0, cells), numbers, "amin")
        self._dense = dense[:-1].view(num_requests, self.height)

    def of(self, owners: Tensor) -> Tensor:
        """[num_owners * height] int64: the rows of these requests."""
        return self._dense[owners].flatten()
