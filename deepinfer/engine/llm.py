"""The offline interface: prompts in, texts out."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from deepinfer.config import EngineArgs
from deepinfer.engine.core import EngineCore
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.prompt import MultiModalData, Prompt, params_for_each
from deepinfer.model.progress import progress_bar
from deepinfer.request import FinishReason, Request, RequestOutput, SamplingParams
from deepinfer.tokenizer import Tokenizer


class LLM:
    """A model in this process: :class:`LLMEngine` with texts, and calls that wait for their own answers.

    Example::

        llm = LLM("nano")
        print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=32))[0])

    Any number of threads may share it.  Ctrl-C, or an exception of a signal handler, ends the interrupted call and its requests,
    nothing else.  A forked child cannot use it.

    Invariant: ``_boxes`` has exactly the requests of calls that have not ended.  Only the calls hold strong references to its
    values.
    """

    def __init__(
        self,
        model: str = "nano",
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        expert_parallel_size: int = 1,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        decode_sequence: bool = True,
        *,
        progress: bool = True,
        **engine_args: Any,  # noqa: ANN401  (settings of any type; EngineArgs checks them)
    ) -> None:
        """Load a model.

        Args:
            model: checkpoint directory, ``nano`` or ``random``.
            tokenizer: directory of another ``tokenizer.json``.
            decode_sequence: whether :meth:`generate` returns texts instead of per-token records.
            progress: whether loading shows bars.
            engine_args: settings of :class:`EngineArgs`.

        Raises:
            ConfigError: a setting or a file is not usable; says which and why.
        """
        settings = {"disable_log_stats": True, "stop_preempted_request": False, "offline_inference": True, **engine_args}
        args = EngineArgs.from_keywords(
            model=model,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            expert_parallel_size=expert_parallel_size,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            **settings,
        )
        self._engine = LLMEngine.from_engine_args(args, progress=progress)
        self.args = args
        self.config = self._engine.config
        self.decode_sequence = decode_sequence
        self._boxes: weakref.WeakValueDictionary[str, _Inbox] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def close(self) -> None:
        """Wait for the step in flight and give the model's memory back; the object cannot be used afterwards."""
        self._engine.close()

    def generate(
        self,
        prompts: str | Iterable[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Iterable[Iterable[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: Sequence[MultiModalData | None] | MultiModalData | None = None,
    ) -> list[str] | list[list[RequestOutput]]:
        """Complete every prompt.

        Args:
            prompts: one text or a list.
            sampling_params: one for all, or one per prompt.  Without a seed every prompt draws its own, also if prompts share one
                object.  With a seed the same prompt gives the same text.
            prompt_token_ids: ids instead of texts, as lists or arrays.  If both are given, equally many; ids are used.
            use_tqdm: show progress.
            multi_modal_data: per prompt ``{"image_bytes": [file contents…]}``, optionally with ``image_sizes``, the (width,
                height) that each picture must have.

        Returns:
            Texts in the order of the prompts, or with ``decode_sequence=False`` the records of each text's tokens.  The ``n``
            answers to a prompt stand side by side.

        Raises:
            RequestError: a prompt or a parameter is not usable; nothing was generated.
            ContextTooLong: a prompt is too long.
            ConfigError: the object was closed, or this is a forked child of the process that made it.
            StepFailed: a step broke, now or earlier; make a new object.
        """
        records = self.generate_records(prompts, sampling_params, prompt_token_ids, use_tqdm, multi_modal_data)
        return [self.text(each) for each in records] if self.decode_sequence else records

    def generate_records(
        self,
        prompts: str | Iterable[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Iterable[Iterable[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: Sequence[MultiModalData | None] | MultiModalData | None = None,
    ) -> list[list[RequestOutput]]:
        """:meth:`generate`, always with the records of each text's tokens."""
        self._engine.driver.check()
        ready = self._engine.reader.prompts(prompts, prompt_token_ids, multi_modal_data)
        params = params_for_each(sampling_params, len(ready))
        answers: list[list[list[RequestOutput]]] = [[] for _ in ready]
        with (
            progress_bar(len(ready), unit="prompt", desc="generating", shown=use_tqdm) as bar,
            closing(self._complete(ready, params)) as completions,
        ):
            for number, records in completions:
                answers[number] = records
                bar.update()
        return [records for each in answers for records in each]

    def completions(
        self, prompt_token_ids: Sequence[Iterable[int]], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[tuple[int, list[list[RequestOutput]]], None, None]:
        """Complete every prompt and yield each as soon as it is complete.  Closing the iterator ends the other prompts.

        Yields:
            The prompt's number from 0 and the records of its ``n`` answers, in the order of completion.

        Raises:
            RequestError: a prompt or a parameter is not usable; nothing was generated.
        """
        self._engine.driver.check()
        ready = self._engine.reader.prompts(None, prompt_token_ids, None)
        return self._complete(ready, params_for_each(sampling_params, len(ready)))

    def _complete(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> Generator[tuple[int, list[list[RequestOutput]]], None, None]:
        requests = [self._request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        numbers = {each.request_id: number for number, each in enumerate(requests)}
        inbox = _Inbox(requests)
        num_given = 0
        try:
            self._take_in(inbox, requests, prompts)
            while num_given < len(requests):
                self._engine.driver.run(self._turn_unless, partial(inbox.has_ended_more_than, num_given))
                for request_id in inbox.ended[num_given:]:
                    num_given += 1
                    number = numbers[request_id]
                    yield number, _by_sample(inbox.records[request_id], params[number].n)
        finally:
            self._end(requests)

    def stream(
        self,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, a text or token ids, token by token.  Closing the iterator ends the request.

        Records of ``n`` answers are interleaved.  Several streams may be open, and :meth:`generate` may run at the same time:
        each gets its own records.  Errors are those of :meth:`generate`; the iterator raises them too.
        """
        self._engine.driver.check()
        (params,) = params_for_each(sampling_params, 1)
        return self._stream(prompt, prompt_token_ids, params)

    def _stream(self, text: str | None, ids: Iterable[int] | None, params: SamplingParams) -> Iterator[RequestOutput]:
        self._engine.driver.check()
        ready = self._engine.reader.of_text(text) if ids is None else self._engine.reader.of_ids(ids)
        request = self._request(ready, params)
        inbox = _Inbox([request])
        box = inbox.records[request.request_id]
        num_open = params.n
        try:
            self._take_in(inbox, [request], [ready])
            while num_open:
                self._engine.driver.check()
                if not box:
                    self._engine.driver.run(self._turn_unless, lambda: bool(box))
                    continue
                output = box.popleft()
                num_open -= output.finished
                yield output
        finally:
            self._end([request])

    def prompt_ids(self, text: str) -> list[int]:
        """Ids that :meth:`generate` makes of a text; raises :class:`ContextTooLong` if there are too many."""
        return self._engine.reader.text_ids(text)

    def text(self, records: Iterable[RequestOutput]) -> str:
        """The text of a request's records, without the token that ended it."""
        return self._engine.tokenizer.decode([token_id for each in records if (token_id := self.text_token(each)) is not None])

    def text_token(self, record: RequestOutput) -> int | None:
        """The record's token if it belongs to the text; None for the end token or the stop token that ended the answer."""
        is_end = record.finish_reason == FinishReason.STOP or record.token_id == self.config.eos_token_id
        return None if is_end else record.token_id

    @property
    def _core(self) -> EngineCore:
        """For tests, which look inside while nothing runs."""
        return self._engine.driver.core

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=prompt.token_ids,
            params=params,
            image_hashes=dict(prompt.image_hashes),
        )

    def _take_in(self, inbox: _Inbox, requests: Sequence[Request], prompts: Sequence[Prompt]) -> None:
        """Add requests, whose records go to ``inbox``.  If it raises, some of them may have been added."""
        now = time.monotonic()
        self._boxes.update({each.request_id: inbox for each in requests})

        wanted = {each.params.structured_output: None for each in requests}
        grammars = {args: None if args is None else self._engine.driver.compile(args) for args in wanted}

        def add() -> None:
            for request, prompt in zip(requests, prompts, strict=True):
                self._engine.driver.add(request, prompt.pictures, now, grammars[request.params.structured_output])

        self._engine.driver.run(add)

    def _turn_unless(self, has_news: Callable[[], bool]) -> None:
        """A job: one turn of the engine, whose records go to their inboxes.  No turn if another call's turn brought news."""
        if has_news():
            return
        orphans = []
        for output in self._engine.step():
            inbox = self._boxes.get(output.request_id)
            if inbox is not None:
                inbox.put(output)
            else:
                orphans.append(output.request_id)  # its call was interrupted twice and could not end it
        if orphans:
            self._engine.driver.drop(orphans)

    def _end(self, requests: Iterable[Request]) -> None:
        """Forget requests, ended or not, added or not."""
        ids = [each.request_id for each in requests]
        self._engine.driver.drop(ids)
        for request_id in ids:
            self._boxes.pop(request_id, None)


class _Inbox:
    """Records for one call.

    Attributes:
        records: request id -> records that the call has not taken yet.
        ended: requests whose answers have all ended, in the order of their ends.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.records: dict[str, deque[RequestOutput]] = {}
        self.ended: list[str] = []
        self._num_open: dict[str, int] = {}
        for each in requests:
            self.records[each.request_id] = deque()
            self._num_open[each.request_id] = each.params.n

    def has_ended_more_than(self, num_requests: int) -> bool:
        """Whether more than ``num_requests`` requests have ended."""
        return len(self.ended) > num_requests

    def put(self, output: RequestOutput) -> None:
        self.records[output.request_id].append(output)
        self._num_open[output.request_id] -= output.finished
        if output.finished and not self._num_open[output.request_id]:
            self.ended.append(output.request_id)


def _by_sample(records: Iterable[RequestOutput], num_samples: int) -> list[list[RequestOutput]]:
    """Records of each answer."""
    answers: list[list[RequestOutput]] = [[] for _ in range(num_samples)]
    for record in records:
        answers[record.sample_idx].append(record)
    return answers
