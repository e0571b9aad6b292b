"""Matching one answer: which tokens may come next, along drafts too, and which must.

A :class:`Matcher` belongs to one answer.  It is free, constrained, ended or failed:

* Free text comes before the trigger.  All tokens are allowed, except the end token if the grammar needs the trigger.  While the
  bound token or the budget forces tokens, only the forced token is allowed.
* In constrained text the library decides.  Special tokens are allowed only if a Lark grammar names them.  The end token is
  allowed exactly where the grammar accepts.
* After the end token everything is allowed, because nothing after it is part of the answer.

Masks are rows of bits, one for each token.  Row ``j`` belongs to the position after the emitted tokens and the first ``j``
drafts.  A mask depends only on the tokens before it, so drafts never change what is allowed.  Rows after a draft that is not
allowed are all ones: no token there can be emitted.  A row that the library cannot compute within its limits is all zeros.

:meth:`Matcher.fill` is the plain way, row by row.  :class:`MaskFiller` fills the rows of many matchers in parallel, in one call
of the library, and gives the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import llguidance
import numpy as np
import numpy.typing as npt

from deepinfer.errors import GrammarFailed, reason
from deepinfer.grammar.compiler import CompiledGrammar
from deepinfer.grammar.vocabulary import WORD_BITS, Words, unpack
from deepinfer.request import StructuredOutput

_FEW_WORDS: Final = 256
ALL: Final = np.int32(-1)
"""A word of a mask that allows all its tokens."""

MatcherState = Literal["free", "constrained", "ended", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Tokens that should be the next drafts.

    They are proposals: the grammar forces their bytes, and they are the tokens that the tokenizer gives for these bytes.  Masks
    verify them like any other drafts.

    Attributes:
        offset: drafts after which the run begins; 0 begins at once.
        token_ids: the run, not empty.
    """

    offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Free:
    """A position in free text.

    Attributes:
        num_matched: tokens of the trigger that stand at the end of the text.
        num_tokens: tokens of free text so far, without forced ones.
        forced: tokens that must come next.
    """

    num_matched: int = 0
    num_tokens: int = 0
    forced: tuple[int, ...] = ()


class _Trigger:
    """Finds the trigger in free text, and what is forced.

    Source: Knuth, Morris and Pratt's search, one token at a time.
    """

    def __init__(self, args: StructuredOutput, eos_token_id: int) -> None:
        self._args = args
        self._ids = args.trigger_token_ids
        self._eos_token_id = eos_token_id
        self._shorter = [0] * len(self._ids)
        """The longest proper beginning of the trigger that ends the first ``i + 1`` tokens of it."""
        matched = 0
        for position in range(1, len(self._ids)):
            matched = self._after(matched, self._ids[position])
            self._shorter[position] = matched

    @property
    def start(self) -> _Free:
        """The position before the first token."""
        return self._with_budget(_Free())

    def step(self, free: _Free, token_id: int) -> _Free | None:
        """The position after a token that is not the end token; None if the trigger is complete."""
        matched = self._after(free.num_matched, token_id)
        if matched == len(self._ids):
            return None
        if free.forced and token_id == free.forced[0]:
            return _Free(matched, free.num_tokens, free.forced[1:] or self._ids[matched:])
        made = _Free(matched, free.num_tokens + 1)
        if token_id == self._args.bound_token_id:
            return _Free(matched, made.num_tokens, self._ids[matched:])
        return self._with_budget(made)

    def allows(self, free: _Free, token_id: int) -> bool:
        """Whether a token may come next."""
        if free.forced:
            return token_id == free.forced[0]
        return not (self._args.end_needs_trigger and token_id == self._eos_token_id)

    def write(self, free: _Free, row: Words) -> None:
        """Write the mask of a position."""
        if free.forced:
            row[:] = 0
            _set(row, free.forced[0], True)
        else:
            row[:] = ALL
            if self._args.end_needs_trigger:
                _set(row, self._eos_token_id, False)

    def rules_out(self, free: _Free) -> bool:
        """Whether some token may not come next."""
        return bool(free.forced) or self._args.end_needs_trigger

    def _with_budget(self, free: _Free) -> _Free:
        budget, bound = self._args.max_free_tokens, self._args.bound_token_id
        if budget is None or free.num_tokens < budget:
            return free
        forced = self._ids[free.num_matched :] if bound is None else (bound,)
        return _Free(free.num_matched, free.num_tokens, forced)

    def _after(self, matched: int, token_id: int) -> int:
        while matched and (matched == len(self._ids) or self._ids[matched] != token_id):
            matched = self._shorter[matched - 1]
        return matched + (self._ids[matched] == token_id)


@dataclass(slots=True)
class _Rows:
    """What one call fills: rows of free text, and from some row on rows of the library.

    Attributes:
        free: positions of the rows of free text.
        first: number of the first row of the library; None if there is none.
        drafts: legal drafts of free text come first; these are the drafts after row ``first``.
    """

    free: list[_Free]
    first: int | None
    drafts: list[int]


class Matcher:
    """One answer's position in its grammar.

    Invariant: the library's matcher has consumed exactly the emitted tokens of constrained text, without the end token.
    """

    def __init__(self, compiled: CompiledGrammar, args: StructuredOutput) -> None:
        """Start before the first token."""
        self._compiled = compiled
        self._vocabulary = compiled.vocabulary
        self._trigger = _Trigger(args, self._vocabulary.eos_token_id)
        self._free: _Free | None = self._trigger.start if args.trigger_token_ids else None
        self._library = compiled.start.deep_copy()
        self._history: list[int] = []
        self._is_ended = False
        self._failure = ""

    @property
    def state(self) -> MatcherState:
        """Where the answer is."""
        if self._failure:
            return "failed"
        if self._is_ended:
            return "ended"
        return "constrained" if self._free is None else "free"

    @property
    def is_accepting(self) -> bool:
        """Whether the end token may come next, or has come."""
        if self._free is not None:
            return self._trigger.allows(self._free, self._vocabulary.eos_token_id)
        return self._is_ended or (not self._failure and self._library.is_accepting())

    def copy(self) -> Matcher:
        """A matcher of another answer that begins with the same tokens."""
        made = object.__new__(Matcher)
        made.__dict__.update(self.__dict__)
        made._library = self._library.deep_copy()
        made._history = self._history.copy()
        return made

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens, or a whole history.  Tokens after the end token are ignored.

        Raises:
            GrammarFailed: a token breaks the grammar, or the library reached a limit.  The matcher is failed from then on.
        """
        if self._failure:
            raise GrammarFailed(self._failure)
        for number, token_id in enumerate(token_ids):
            if self._is_ended:
                return
            if self._free is not None:
                if token_id == self._vocabulary.eos_token_id:
                    self._is_ended = True
                else:
                    self._free = self._trigger.step(self._free, token_id)
            elif token_id == self._vocabulary.eos_token_id:
                if not self._library.is_accepting():
                    self._fail("the answer ended before its grammar was satisfied")
                self._is_ended = True
            elif not self._is_text(token_id):
                self._fail(f"token {token_id} is a special token that the grammar does not name")
            elif not self._library.consume_token(token_id):
                self._fail(f"token {token_id}, number {number} of {len(token_ids)}, breaks the grammar ({self._cause()})")
            else:
                self._history.append(token_id)

    def first_refused(self, token_ids: Sequence[int]) -> int | None:
        """Position of the first token that may not stand there; None if all may.  The matcher does not change."""
        copy = self.copy()
        for position, token_id in enumerate(token_ids):
            if copy._free is not None and not copy._trigger.allows(copy._free, token_id):
                return position
            try:
                copy.advance([token_id])
            except GrammarFailed:
                return position
            if copy._is_ended:
                return position + 1 if position + 1 < len(token_ids) else None
        return None

    def needs_mask(self, draft_ids: Sequence[int] = ()) -> bool:
        """Whether a row that :meth:`fill` would write is not all ones."""
        if self._is_ended:
            return False
        rows = self._rows(draft_ids)
        return bool(self._failure) or rows.first is not None or any(map(self._trigger.rules_out, rows.free))

    def fill(self, draft_ids: Sequence[int], masks: Words) -> Forced | None:
        """Write the masks along drafts, row by row.

        Args:
            draft_ids: [num_drafts]; the first negative id ends the drafts.
            masks: [num_drafts + 1, num_words] int32, overwritten.

        Returns:
            The first run of at most ``2 * num_drafts + 1`` forced tokens that begins at a legal position.

        Raises:
            GrammarFailed: the library cannot compute row 0, or no token is allowed there.

        Cost: the library's time for a mask, 10 to 100 µs, for each row of constrained text.
        """
        rows = self._begin(draft_ids, masks)
        if rows.first is not None:
            self._fill_rows(rows.first, rows.drafts, masks)
        return self._end(rows, masks)

    def _rows(self, draft_ids: Sequence[int]) -> _Rows:
        """Divide the rows between free text and the library."""
        ids = list(draft_ids)
        if min(ids, default=0) < 0:
            ids = ids[: next(at for at, each in enumerate(ids) if each < 0)]
        free: list[_Free] = []
        position = self._free
        while position is not None:
            free.append(position)
            at = len(free) - 1
            is_last = at == len(ids) or ids[at] == self._vocabulary.eos_token_id or not self._trigger.allows(position, ids[at])
            if is_last:
                return _Rows(free, None, [])
            position = self._trigger.step(position, ids[at])
        drafts = ids[len(free) :]
        stop = next((at for at, each in enumerate(drafts) if not self._is_text(each)), len(drafts))
        return _Rows(free, len(free), drafts[:stop])

    def _begin(self, draft_ids: Sequence[int], masks: Words) -> _Rows:
        """Write the rows that are not the library's."""
        if self._failure:
            raise GrammarFailed(self._failure)
        rows = _Rows([], None, []) if self._is_ended else self._rows(draft_ids)
        for row, position in zip(masks, rows.free, strict=False):
            self._trigger.write(position, row)
        if rows.first is None:
            masks[len(rows.free) :] = ALL
        return rows

    def _fill_rows(self, first: int, drafts: list[int], masks: Words) -> None:
        """Write the library's rows from ``first`` on; the state is as before."""
        num_taken = 0
        for row in masks[first : first + len(drafts) + 1]:
            self._library.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._library.is_error():
                row[:] = 0
                break
            token_id = drafts[num_taken] if num_taken < len(drafts) else None
            if token_id is None or not _has(row, token_id) or not self._library.consume_token(token_id):
                break
            num_taken += 1
        if not self._library.is_error():
            self._library.rollback(num_taken)
        if self._library.is_error():
            self._restore()

    def _end(self, rows: _Rows, masks: Words) -> Forced | None:
        """Remove forbidden tokens from the library's rows, write ones after a forbidden draft, and find forced tokens."""
        limit = 2 * (len(masks) - 1) + 1
        forced: Forced | None = None
        for at, position in enumerate(rows.free):
            if position.forced and forced is None:
                forced = Forced(offset=at, token_ids=self._run_of_free(position, limit))
        if rows.first is None:
            return forced
        for number in range(len(rows.drafts) + 1):
            row = masks[rows.first + number]
            row &= self._compiled.allowed
            allowed = _some_allowed(row)
            if not len(allowed) and rows.first + number == 0:
                self._fail(f"no token is allowed next ({self._cause()})")
            if len(allowed) == 1 and forced is None:
                run = self._run(rows.drafts[:number], int(allowed[0]), limit)
                forced = Forced(offset=rows.first + number, token_ids=run)
            if number == len(rows.drafts) or not _has(row, rows.drafts[number]):
                masks[rows.first + number + 1 :] = ALL
                break
        return forced

    def _run_of_free(self, position: _Free, limit: int) -> tuple[int, ...]:
        """Forced tokens of free text, and of the grammar after them."""
        made: list[int] = []
        following: _Free | None = position
        while following is not None and following.forced and len(made) < limit:
            made.append(following.forced[0])
            following = self._trigger.step(following, made[-1])
        if following is None and len(made) < limit:
            made += self._tokens_after([], limit - len(made))
        return tuple(made)

    def _run(self, drafts: list[int], only: int, limit: int) -> tuple[int, ...]:
        """Forced tokens after ``drafts``, where ``only`` is the only token that is allowed."""
        made = self._tokens_after(drafts, limit)
        return tuple(made) if made and made[0] == only else (only,)

    def _tokens_after(self, drafts: list[int], limit: int) -> list[int]:
        """What the library forces after ``drafts``, and the end token if it alone may follow; the state is as before."""
        num_taken = 0
        made: list[int] = []
        if not drafts or self._library.consume_tokens(drafts):
            num_taken = len(drafts)
            made = self._library.compute_ff_tokens()[:limit]
            if len(made) < limit and (not made or self._library.consume_tokens(made)):
                num_taken += len(made)
                if self._library.is_stopped() and not self._library.is_error():
                    made = [*made, self._vocabulary.eos_token_id]
        if not self._library.is_error():
            self._library.rollback(num_taken)
        if self._library.is_error():
            self._restore()
        return made

    def _is_text(self, token_id: int) -> bool:
        """Whether constrained text may contain a token at all, the end token apart."""
        is_known = 0 <= token_id < self._vocabulary.vocab_size and token_id != self._vocabulary.eos_token_id
        return is_known and _has(self._compiled.allowed, token_id)

    def _restore(self) -> None:
        """Make the library's matcher again, because an error along drafts cannot be taken back."""
        self._library = self._compiled.start.deep_copy()
        if self._history and not self._library.consume_tokens(self._history):
            self._failure = f"the answer cannot be read again ({self._cause()})"

    def _cause(self) -> str:
        return reason(ValueError(self._library.get_error().replace("<non-verbose/>", "") or self._library.stop_reason()))

    def _fail(self, message: str) -> None:
        self._failure = message
        raise GrammarFailed(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillJob:
    """The rows of one matcher in a batch.

    Attributes:
        matcher: a matcher that no other job of the batch has.
        first_row: its first row.
        draft_ids: [num_drafts]; ``num_drafts + 1`` rows are written.
    """

    matcher: Matcher
    first_row: int
    draft_ids: Sequence[int]


class MaskFiller:
    """Fills the masks of many matchers in parallel."""

    def __init__(self, num_threads: int) -> None:
        """Start the library's threads."""
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, jobs: Sequence[FillJob], masks: Words) -> list[Forced | GrammarFailed | None]:
        """Write the masks of all jobs, as :meth:`Matcher.fill` does for one.

        Args:
            masks: [num_rows, num_words] int32, contiguous; rows of no job keep their bits.

        Returns:
            For each job its forced tokens, or why its answer fails.
        """
        assert masks.flags.c_contiguous, "the library writes through a pointer"
        results: list[Forced | GrammarFailed | None] = [None] * len(jobs)
        begun: dict[int, _Rows] = {}
        plain = []
        drafted = []
        for number, job in enumerate(jobs):
            own = masks[job.first_row : job.first_row + len(job.draft_ids) + 1]
            try:
                rows = begun[number] = job.matcher._begin(job.draft_ids, own)
            except GrammarFailed as error:
                results[number] = error
                continue
            if rows.first is not None and rows.drafts:
                drafted.append((job.matcher._library, job.first_row + rows.first, rows.drafts))
            elif rows.first is not None:
                plain.append((job.matcher._library, job.first_row + rows.first))
        at, stride, num_rows = masks.ctypes.data, masks.strides[0], len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, at, stride, num_rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, at, stride, num_rows)
        for number, rows in begun.items():
            job = jobs[number]
            own = masks[job.first_row : job.first_row + len(job.draft_ids) + 1]
            try:
                if rows.first is not None and job.matcher._library.is_error():  # the library does not say at which row
                    job.matcher._restore()
                    own[rows.first :] = ALL
                    job.matcher._fill_rows(rows.first, rows.drafts, own)
                results[number] = job.matcher._end(rows, own)
            except GrammarFailed as error:
                results[number] = error
        return results


def _has(row: Words, token_id: int) -> bool:
    return bool((int(row[token_id // WORD_BITS]) >> (token_id % WORD_BITS)) & 1)


def _set(row: Words, token_id: int, is_allowed: bool) -> None:
    bit = np.uint32(1 << (token_id % WORD_BITS))
    words = row.view(np.uint32)
    if is_allowed:
        words[token_id // WORD_BITS] |= bit
    else:
        words[token_id // WORD_BITS] &= ~bit


def _some_allowed(row: Words) -> npt.NDArray[np.int64]:
    """The token that a row allows if it is only one; otherwise no token, or several.

    Cost: the first words decide nearly always, so a row takes 1 µs and not 10.
    """
    for words in (row[:_FEW_WORDS], row):
        found = np.flatnonzero(words)
        if len(found) > 1:
            return found
    return np.flatnonzero(unpack(row[found])) + found * WORD_BITS if len(found) else found
