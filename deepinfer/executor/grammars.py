"""Matchers of running requests, and the masks of a step.

A host thread of its own advances the matchers and fills the masks.  It starts when a step is launched, waits until the tokens and
the drafts of the steps before are on the host, and works while the device runs the forward pass.  Only the decision of the step
waits for it.  The thread computes with NumPy and the grammar library, never with torch: OpenMP would give it a team of threads.

Invariant: a matcher in the thread has consumed exactly the output tokens of its request up to the step that the thread works on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.errors import GrammarFailed, StepFailed
from deepinfer.executor.masks import StepMasks
from deepinfer.executor.results import Launched
from deepinfer.executor.thread import Job, SerialThread
from deepinfer.grammar.compiler import CompiledGrammar
from deepinfer.grammar.matcher import FillJob, MaskFiller, Matcher
from deepinfer.request import StructuredOutput

_WORD_BITS = 32
_NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))
"""Threads of the library, beside those of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constrained:
    """The grammar of an unfinished request."""

    compiled: CompiledGrammar
    args: StructuredOutput


class Grammars:
    """Owns the matchers of one rank.

    Call :meth:`add` once for each constrained request, :meth:`start` when it gets a slot, :meth:`begin` for each step that
    decides tokens, and :meth:`launched` after that step.
    """

    def __init__(self, vocab_size: int, num_drafts: int) -> None:
        """Start without requests; the thread starts with the first one."""
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._num_drafts = num_drafts
        self._requests: dict[str, _Constrained] = {}
        self._before: dict[str, Launched] = {}  # the last step of each request, whose tokens its matcher has not consumed
        self._matchers: dict[str, Matcher | str] = {}  # only the thread uses it; a failed request has the reason
        self._thread: SerialThread | None = None
        self._filler: MaskFiller | None = None

    def __contains__(self, request_id: str) -> bool:
        """Whether the request has a grammar."""
        return request_id in self._requests

    def add(self, request_id: str, compiled: CompiledGrammar, args: StructuredOutput) -> None:
        """Remember the grammar of a request."""
        self._requests[request_id] = _Constrained(compiled=compiled, args=args)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        if self._requests.pop(request_id, None) is not None:
            self._before.pop(request_id, None)
            self._run().submit(self._matchers.pop, request_id, None)

    def start(self, request_id: str, output_ids: npt.NDArray[np.int32]) -> None:
        """Make a matcher for a request that begins or is resumed with ``output_ids`` [n]; without grammar nothing happens."""
        constrained = self._requests.get(request_id)
        if constrained is not None:
            self._before.pop(request_id, None)
            self._run().submit(self._start, request_id, constrained, output_ids.tolist())

    def begin(self, request_ids: Sequence[str]) -> Job[StepMasks] | None:
        """Start to fill the masks of a step.

        Args:
            request_ids: requests that the step decides, in order.

        Returns:
            None if no request has a grammar.
        """
        owners = [
            (number, name, self._before.pop(name, None)) for number, name in enumerate(request_ids) if name in self._requests
        ]
        return self._run().submit(self._fill, owners) if owners else None

    def launched(self, launched: Launched) -> None:
        """Remember a step, whose tokens and drafts the matchers of its requests need next."""
        for name in {*launched.request_ids, *launched.drafting_ids}:
            if name in self._requests:
                self._before[name] = launched

    def _run(self) -> SerialThread:
        if self._thread is None:
            self._thread = SerialThread("deepinfer-grammars", StepFailed("the engine was closed; make another one"))
        return self._thread

    # In the thread

    def _start(self, request_id: str, constrained: _Constrained, output_ids: list[int]) -> None:
        matcher = Matcher(constrained.compiled, constrained.args)
        self._matchers[request_id] = matcher
        try:
            matcher.advance(output_ids)
        except GrammarFailed as error:
            self._matchers[request_id] = str(error)

    def _fill(self, owners: Sequence[tuple[int, str, Launched | None]]) -> StepMasks:
        start = time.perf_counter()
        for launched in {id(each): each for _, _, each in owners if each is not None}.values():
            launched.wait()
        begin = time.perf_counter()
        count = len(owners)
        bits = np.full((count, self._num_drafts + 1, self._num_words), -1, dtype=np.int32)
        forced_ids = np.full((count, 2 * self._num_drafts + 1), -1, dtype=np.int64)
        forced_offsets = np.zeros(count, dtype=np.int64)
        failures: dict[str, str] = {}
        height, jobs = self._num_drafts + 1, []
        for idx, (_, name, before) in enumerate(owners):
            matcher = self._matchers[name]
            try:
                if isinstance(matcher, str):
                    raise GrammarFailed(matcher)
                if before is not None:
                    matcher.advance(before.tokens_of(name))
            except GrammarFailed as error:
                self._matchers[name] = failures[name] = str(error)
                continue
            drafts = before.drafts_of(name) if before is not None else []
            jobs.append((idx, name, FillJob(matcher=matcher, first_row=idx * height, draft_ids=drafts)))
        if self._filler is None:
            self._filler = MaskFiller(_NUM_THREADS)
        results = self._filler.fill([job for _, _, job in jobs], bits.reshape(count * height, self._num_words))
        for (idx, name, _), result in zip(jobs, results, strict=True):
            if isinstance(result, GrammarFailed):
                self._matchers[name] = failures[name] = str(result)
                bits[idx] = -1
            elif result is not None:
                forced_offsets[idx] = result.offset
                ids = result.token_ids[: forced_ids.shape[1]]
                forced_ids[idx, : len(ids)] = ids
        end = time.perf_counter()
        return StepMasks(
            owners=np.fromiter((number for number, _, _ in owners), np.int64, count),
            bits=bits,
            forced_ids=forced_ids,
            forced_offsets=forced_offsets,
            failures=failures,
            fill_ms=1e3 * (end - begin),
            wait_ms=1e3 * (begin - start),
        )
