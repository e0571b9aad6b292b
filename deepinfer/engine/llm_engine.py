"""The engine in this process, turned by its caller: add requests, step, read the records.

It is for programs with a loop of their own.  :class:`deepinfer.LLM` stands on it and is simpler.  :class:`AsyncEngineClient`
serves many callers.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepinfer.config import EngineArgs
from deepinfer.engine.driver import Driver
from deepinfer.engine.loader import Loaded, load
from deepinfer.engine.prompt import MultiModalData, PromptReader
from deepinfer.errors import RequestError, shown
from deepinfer.metrics import Snapshot
from deepinfer.request import Request, RequestOutput, SamplingParams, as_flag, as_names, as_number, as_text, as_whole_numbers
from deepinfer.scheduler.stats import SchedulerStats
from deepinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """A model and its queue.

    Example::

        engine = LLMEngine.from_engine_args(EngineArgs(model="nano"))
        engine.add_request(0, "a", SamplingParams(max_tokens=8), [0, 5, 6])
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.token_id)
        engine.close()

    Any number of threads may share it.  Each record goes to one of the threads that step.  Ctrl-C, or an exception of a signal
    handler, interrupts a wait and nothing else: the next step returns the records of the interrupted one.  A forked child cannot
    use it.

    Attributes:
        args: the settings.
        config: the model's shape.
        tokenizer: of the model.
        reader: makes prompts of texts, ids and images.
        driver: turns the core.
    """

    def __init__(self, args: EngineArgs, loaded: Loaded) -> None:
        """Serve ``loaded``; see :meth:`from_engine_args`."""
        self.args = args
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.reader = PromptReader(args, loaded.config, loaded.tokenizer)
        self.driver = Driver(loaded.core, log_every=None if args.disable_log_stats else args.logging_interval_steps)
        self._untaken: list[RequestOutput] = []  # records that were not returned yet
        self._lock = threading.Lock()  # of the line above, for as long as it takes to exchange the list

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, progress: bool = True) -> LLMEngine:
        """Load a model.

        Raises:
            ConfigError: settings, files or memory do not allow it.
        """
        return cls(args, load(args, progress=progress))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def add_request(
        self,
        user_id: int | str,
        request_id: str,
        sampling_params: SamplingParams,
        prompt_token_ids: Iterable[int],
        multi_modal_data: MultiModalData | None = None,
        arrival_time: float | None = None,
        extra: Mapping[str, Any] | None = None,
        enqueue: bool = True,
        chunk_checkpoints: Iterable[int] | None = None,
    ) -> bool:
        """Queue a request.

        Args:
            user_id: the user, for the log; all users are equal.
            request_id: unique among unfinished requests.
            sampling_params: how to sample; without a seed the request draws its own.
            prompt_token_ids: one image placeholder an image; a list or an array.
            multi_modal_data: ``{"image_bytes": [file contents…]}``, optionally with ``image_sizes``, the (width, height) that
                each picture must have.
            arrival_time: time of arrival in seconds since the epoch; default now.
            extra: must be empty.
            enqueue: must be True.
            chunk_checkpoints: positions, multiples of a page, at which a chunk of the prompt ends so that its state can be kept.

        Returns:
            Whether the request was taken in.  A request with a token id outside the vocabulary is dropped with a warning.

        Raises:
            RequestError: the request cannot be served; nothing was taken in.
            ContextTooLong: the prompt is too long.
            ConfigError: the engine was closed, or this is a forked child of the process that made it.
            StepFailed: a step broke earlier; make a new engine.

        If an exception interrupts the wait, the request may have been taken in; :meth:`abort_request` is right in both cases.
        """
        self.driver.check()
        now, arrived_s = time.time(), time.monotonic()
        try:
            if not isinstance(user_id, int | str):
                raise RequestError(f"user_id={shown(user_id)} is neither a number nor a string; give one of them")
            as_text("request_id", request_id)
            if extra is not None and not (isinstance(extra, Mapping | list | tuple) and not extra):
                raise RequestError(f"extra={shown(extra)} means nothing to this engine; leave it out")
            if not as_flag("enqueue", enqueue):
                raise RequestError("enqueue=False leaves a request to another engine, which this version cannot; leave it out")
            if arrival_time is not None:
                most = sys.float_info.max
                arrival_time = as_number("arrival_time", arrival_time, 0, most, "seconds since the epoch, or leave it out")
                arrived_s -= max(0.0, now - arrival_time)
            ids = self.reader.unchecked_ids(prompt_token_ids)
            outside = next((each for each in ids if not 0 <= each < self.config.vocab_size), None)
            if outside is not None:
                logger.warning(
                    "request %s of user %s is dropped: token id %s is outside the vocabulary of %d",
                    request_id,
                    user_id,
                    shown(outside),
                    self.config.vocab_size,
                )
                return False
            prompt = self.reader.of_ids(ids, multi_modal_data)
            checkpoints = () if chunk_checkpoints is None else chunk_checkpoints
            request = Request(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                params=sampling_params,
                image_hashes=prompt.image_hashes,
                checkpoints=tuple(as_whole_numbers("chunk_checkpoints", checkpoints, things="positions", low=None)),
            )
            self.driver.add(request, prompt.pictures, arrived_s)
        except RequestError as error:
            self.driver.refused(error)
            raise
        return True

    def abort_request(self, request_ids: str | Iterable[str]) -> tuple[int, int]:
        """Drop requests and ignore unknown ids.  No more records of these requests come.

        Returns:
            How many requests there were, and how many tokens they had, all answers together.

        Raises:
            RequestError: ``request_ids`` is neither an id nor several ids.
        """
        return self.driver.run(self._abort, as_names("request_ids", request_ids))

    def step(self) -> list[RequestOutput]:
        """Turn the loop once; returns the tokens of the step before, none on the first turn.

        A request with ``n`` answers has ended when each answer had a finished record; ``sample_idx`` tells the answers apart.

        Raises:
            StepFailed: a step broke, now or earlier; the engine cannot go on.
        """
        return self._outputs(self.driver.turn)

    def flush_inflight_reqs(self) -> list[RequestOutput]:
        """Wait for the step in flight and return its tokens; nothing new is started."""
        return self._outputs(self.driver.flush)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has work."""
        return self.driver.run(lambda: bool(self._untaken) or not self.driver.core.is_idle)

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return self.driver.run(lambda: self.driver.core.num_unfinished)

    def get_num_pendings(self) -> int:
        """Requests that wait for memory."""
        return self.stats().num_waiting

    def stats(self) -> SchedulerStats:
        """Levels and counters of the scheduler."""
        return self.driver.run(lambda: self.driver.core.stats())

    def metrics(self) -> Snapshot:
        """Counters and histograms since the start."""
        return self.driver.snapshot()

    def close(self) -> None:
        """Wait for the step in flight and free the model's memory.  The object cannot be used afterwards."""
        self.driver.close()

    def _abort(self, request_ids: list[str]) -> tuple[int, int]:
        """A job."""
        with self._lock:
            self._untaken = [each for each in self._untaken if each.request_id not in request_ids]
        return self.driver.abort(request_ids)

    def _outputs(self, turn: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Records of a turn, and of earlier turns whose caller was interrupted."""

        def job() -> None:
            outputs = turn()
            with self._lock:
                self._untaken += outputs

        self.driver.run(job)
        with self._lock:
            outputs, self._untaken = self._untaken, []
        return outputs
