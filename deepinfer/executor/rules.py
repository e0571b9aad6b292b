"""Token rules of each request: bias, penalties, allowed tokens, forced tokens.

This module makes all changes to logits before temperature and filters.  A rule is evaluated at each row of its request as if the
drafts before that row had been emitted.  Only emitted tokens enter the counts.

Invariant: the logits of a request depend on its own parameters, text and drafts alone.  Nothing here waits for the device.

Cost: only requests that use a rule cost memory and time.  While such a request holds a slot, it takes for each token of the
vocabulary 4 bytes for a bias, 5 for penalties, 1 for a mask (:func:`rules_bytes`).  A step without such requests gets its logits
and the engine's mask back unchanged.  Temporaries stay within the bound of ``ops.sampling``.
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
"""Bytes for each id: a bias, an output count, whether the prompt contains the id, and a mask."""


def rules_bytes(vocab_size: int, *, num_requests: int, num_rows: int, element_size: int) -> int:
    """Most bytes that rules take, without their bounded temporaries.

    The sum of three terms, each times ``vocab_size``:

    * num_requests x 10 x 2: tables of bias, counts and masks, which grow by doubling.
    * num_requests x 4: the copy of the table that grows.
    * (num_rows + 1) x (element_size + 1): changed logits and their masks.

    Args:
        num_requests: most requests that run at once.
        num_rows: most rows with logits in a step.
        element_size: bytes of a logit.
    """
    tables = num_requests * (2 * _RULE_BYTES + 4)
    return vocab_size * (tables + (num_rows + 1) * (element_size + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Maps the rows of a step's logits to requests.

    Attributes:
        request_ids: on the host, in the order of their rows; unknown ids have no rules.
        owners: [num_logits] int64, index into request_ids; padding rows come last and hold any valid index.
        offsets: [num_logits] int64, 0 at the anchor, j at draft j; any value at padding rows.
        positions: [num_logits] int64, position of the token that the row decides.
        draft_ids: [num_requests, width] int64, -1 = no draft.
    """

    request_ids: Sequence[str]
    owners: Tensor
    offsets: Tensor
    positions: Tensor
    draft_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMasks:
    """Tokens that the grammars of a step allow, on the device.

    Attributes:
        owners: [num_constrained] int64 indices of the constrained requests among those of :class:`PackedRows`.
        bits: [num_constrained, width + 1, num_words] int32; bit i of row j allows token i at offset j.
        is_dead: [num_constrained, width + 1] bool, written by :meth:`TokenRules.apply`: rows in which rules and grammar leave no
            token.
    """

    owners: Tensor
    bits: Tensor
    is_dead: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """The rules of one request.

    Attributes:
        params: parameters of the request.
        num_prompt: tokens of the prompt.
        bias, history, mask: index of the request's entry in the table of that name, or None if it needs none.
        golden: [length] int64 on the device, the forced tokens, or None.
        eos_from: first position where the end token is allowed.
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
    """Device tensors with one entry [vocab_size] for each request that needs one.

    Attributes:
        tensors: [capacity, vocab_size] each.
    """

    def __init__(self, vocab_size: int, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.tensors = [torch.zeros(0, vocab_size, dtype=dtype, device=device) for dtype in dtypes]
        self._free: list[int] = []

    def take(self) -> int:
        """Index of a free entry, which holds arbitrary values."""
        if not self._free:
            capacity = len(self.tensors[0])
            more = max(4, capacity)
            self._free = list(range(capacity + more - 1, capacity - 1, -1))
            self.tensors = [torch.cat([each, each.new_zeros(more, each.shape[1])]) for each in self.tensors]
        return self._free.pop()

    def give_back(self, idx: int | None) -> None:
        if idx is not None:
            self._free.append(idx)


class TokenRules:
    """The rules of all unfinished requests.

    Call :meth:`add` once for each request, :meth:`start` when it gets a slot, :meth:`stop` when it loses the slot.  For each step
    call :meth:`apply`, then :meth:`record` with the emitted tokens.

    Invariant: the counts of a running request are the counts of its emitted tokens.  A waiting request holds no table entry.
    """

    def __init__(self, vocab_size: int, *, eos_token_id: int, forbidden: Sequence[int], device: torch.device) -> None:
        """Start without requests; ``forbidden`` ids are never sampled for any request, unless they are forced."""
        self._device = device
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        allowed = torch.ones(vocab_size, dtype=torch.bool)
        allowed[list(forbidden)] = False
        self._allowed_on_host = allowed
        self._allowed = to_device(allowed, device)
        bits = np.unpackbits(np.arange(256, dtype=np.uint8).reshape(-1, 1), axis=1, bitorder="little")
        self._bits_of_byte = to_device(torch.from_numpy(bits.astype(np.bool_)), device)  # [256, 8], the lowest bit first
        self._requests: dict[str, tuple[SamplingParams, int]] = {}  # parameters and tokens of the prompt
        self._rules: dict[str, _Rule] = {}  # only running requests that have rules
        self._biases = _Table(vocab_size, [torch.float32], device)
        self._histories = _Table(vocab_size, [torch.int32, torch.bool], device)  # output counts, whether the prompt has the id
        self._masks = _Table(vocab_size, [torch.bool], device)

    def add(self, request_id: str, params: SamplingParams, num_prompt: int) -> None:
        """Add a request whose prompt has ``num_prompt`` tokens.  Every id in ``params`` must be inside the vocabulary."""
        self._requests[request_id] = params, num_prompt

    def _take(self, params: SamplingParams, num_prompt: int) -> _Rule:
        """Take table entries for a request and fill them in, except the history."""
        allowed = self._allowed_on_host.clone()
        if params.allowed_token_ids is not None:
            allowed &= torch.zeros_like(allowed).index_fill_(0, torch.tensor(params.allowed_token_ids), True)
        allowed.index_fill_(0, torch.tensor(params.banned_token_ids, dtype=torch.int64), False)
        if not bool(allowed.any()):
            allowed[self._eos_token_id] = True  # the engine forbids every token that the request allows: only the end is left
        eos_from = num_prompt + params.first_n_token_no_eos
        if int(allowed.sum()) == int(allowed[self._eos_token_id]):
            eos_from = num_prompt  # the end token is the only allowed token
        mask = bias = history = golden = None
        if params.has_token_mask:
            mask = self._masks.take()
            self._masks.tensors[0][mask] = to_device(allowed, self._device)
        if params.bias_pairs:
            bias = self._biases.take()
            ids, biases = zip(*params.bias_pairs, strict=True)
            values = torch.zeros(self._vocab_size).index_copy_(0, torch.tensor(ids), torch.tensor(biases))
            self._biases.tensors[0][bias] = to_device(values, self._device)
        if params.has_penalties:
            history = self._histories.take()
        if params.golden_token_ids is not None:
            # Each step copies these; tokens after max_tokens are never used.
            golden = to_device(torch.tensor(params.golden_token_ids[: params.max_tokens]), self._device)
        return _Rule(
            params=params, num_prompt=num_prompt, bias=bias, history=history, mask=mask, golden=golden, eos_from=eos_from
        )

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self.stop(request_id)

    def stop(self, request_id: str) -> None:
        """Free the table entries of a request; call :meth:`start` before it runs again."""
        rule = self._rules.pop(request_id, None)
        if rule is not None:
            self._biases.give_back(rule.bias)
            self._histories.give_back(rule.history)
            self._masks.give_back(rule.mask)

    def start(self, request_id: str, token_ids: npt.NDArray[np.int32] | None = None) -> None:
        """Take table entries for a request that has none, and count its text from the beginning.

        Args:
            token_ids: [num_tokens] all tokens of the request, prompt and then output.  None keeps the counts; use it for a
                request without penalties, and for a request that already runs.
        """
        rule = self._rules.get(request_id)
        if rule is None:
            rule = self._take(*self._requests[request_id])
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

    def apply(self, logits: Tensor, packed: PackedRows, grammar: GrammarMasks | None = None) -> tuple[Tensor, Tensor]:
        """Apply the rules of a step's requests to its logits.

        Args:
            logits: [num_logits, vocab_size] of the model; not changed.
            packed: the requests of the logits.
            grammar: tokens that grammars allow; rows without any allowed token are marked in it.

        Returns:
            logits: the same object if no request of the step has a bias or penalties; else [num_logits, vocab_size] fp32 (fp64
                for fp64 logits).
            mask: bool, True = allowed, at least one True for each row: [vocab_size] if no request of the step has a mask, else
                [num_logits, vocab_size].
        """
        present = [(i, self._rules[name]) for i, name in enumerate(packed.request_ids) if name in self._rules]
        if not present and grammar is None:
            return logits, self._allowed
        rows = _Rows(packed, self._device)
        biased = [(i, rule.bias) for i, rule in present if rule.bias is not None]
        penalised = [(i, rule) for i, rule in present if rule.history is not None]
        masked = [(i, rule) for i, rule in present if rule.has_mask]
        if biased or penalised:
            # One extra row takes what is written for missing rows (see _Rows).
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
        if not masked and grammar is None:
            return logits, self._allowed
        mask = self._allowed.repeat(rows.num_logits + 1, 1)
        for part in parts_of(len(masked), num_bytes) if masked else ():
            self._mask(mask, masked[part], rows)
        if grammar is not None:
            for part in parts_of(len(grammar.owners), num_bytes):
                self._constrain(mask, grammar, part, rows)
        return logits, mask[:-1]

    def _constrain(self, mask: Tensor, grammar: GrammarMasks, part: slice, rows: _Rows) -> None:
        """Remove the tokens from ``mask`` that the grammars of some requests forbid.

        A row that would have no token left keeps the tokens of its other rules and is marked as dead.
        """
        owners, words = grammar.owners[part], grammar.bits[part]
        where = rows.of(owners)
        before = mask[where]
        allowed = self._bits_of_byte[words.view(torch.uint8).long()].flatten(-2)[..., : self._vocab_size]
        after = before & allowed.flatten(0, 1)
        is_dead = ~after.any(1, keepdim=True)
        mask.index_copy_(0, where, torch.where(is_dead, before, after))
        grammar.is_dead[part] = is_dead.view(len(owners), rows.height)

    def record(self, request_ids: Sequence[str], emitted: Tensor) -> None:
        """Count the tokens that a step has emitted.

        Args:
            request_ids: on the host.
            emitted: [num_requests, width + 1] int64, -1 = no token.
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
        """The columns of a table of integers as int64 tensors on the device, with one copy."""
        return to_device(torch.tensor(list(numbers), dtype=torch.int64).t().contiguous(), self._device).unbind(0)

    def _penalise(self, logits: Tensor, penalised: Sequence[tuple[int, _Rule]], rows: _Rows) -> None:
        """Apply penalties to the logits of ``penalised`` requests, in place."""
        owners, tables = self._columns((i, rule.history) for i, rule in penalised if rule.history is not None)
        values = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (rule.params for _, rule in penalised)]
        repetition, frequency, presence = to_device(
            torch.tensor(values, dtype=torch.float32).repeat_interleave(rows.height, 0).t().contiguous(), self._device
        )
        counts, seen = (each[tables] for each in self._histories.tensors)
        # [num_penalised, height, vocab_size]: at offset j, drafts 1 … j count as output.
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
        """Write the allowed tokens of ``masked`` requests into ``mask`` [num_logits + 1, vocab_size] bool."""
        tables = [-1 if rule.mask is None else rule.mask for _, rule in masked]
        forced = [rule.golden for _, rule in masked if rule.golden is not None]
        lens = [0 if rule.golden is None else len(rule.golden) for _, rule in masked]
        starts = np.cumsum([0, *lens[:-1]]).tolist()
        owners, table, eos_from, num_prompt, length, start = self._columns(
            (i, idx, rule.eos_from, rule.num_prompt, count, first)
            for (i, rule), idx, count, first in zip(masked, tables, lens, starts, strict=True)
        )
        allowed = self._allowed.expand(len(masked), -1)
        if any(idx >= 0 for idx in tables):
            allowed = torch.where(table.unsqueeze(1) < 0, allowed, self._masks.tensors[0][table.clamp_min(0)])
        where = rows.of(owners)
        positions = rows.positions[where].view(len(masked), -1)
        token_ids = torch.arange(self._vocab_size, device=self._device)
        is_early_eos = (positions < eos_from.unsqueeze(1)).unsqueeze(2) & (token_ids == self._eos_token_id)
        allowed = allowed.unsqueeze(1) & ~is_early_eos
        if forced:
            idx = positions - num_prompt.unsqueeze(1)
            is_forced = (idx >= 0) & (idx < length.unsqueeze(1))
            flat = torch.cat(forced)
            at = torch.where(is_forced, start.unsqueeze(1) + idx, 0)
            allowed = torch.where(is_forced.unsqueeze(2), token_ids == flat[at].unsqueeze(2), allowed)
        mask.index_copy_(0, where, allowed.flatten(0, 1))


class _Rows:
    """Packed rows as a rectangle: every request has ``height`` = width + 1 cells; a cell without a row is missing.

    Attributes:
        height: cells of one request.
        num_logits: number of all rows; index ``num_logits`` stands for missing rows.
        positions: [num_logits + 1] int64, position of the token that the row decides.
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
        # The row with the least number wins, because a padding row may name the cell of a real row.
        dense = torch.full((cells + 1,), self.num_logits, device=device)
        dense.scatter_reduce_(0, cell.clamp(0, cells), numbers, "amin")
        self._dense = dense[:-1].view(num_requests, self.height)

    def of(self, owners: Tensor) -> Tensor:
        """[num_owners * height] int64: row numbers of these requests, ``num_logits`` for missing rows."""
        return self._dense[owners].flatten()
