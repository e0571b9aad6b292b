"""The offline interface: prompts in, texts out."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from deepinfer.config import EngineArgs
from deepinfer.engine.core import EngineCore
from deepinfer.engine.loader import load
from deepinfer.engine.observer import Observer
from deepinfer.engine.prompt import MultiModalData, Prompt, PromptReader, params_for_each
from deepinfer.errors import ConfigError
from deepinfer.model.progress import progress_bar
from deepinfer.request import FinishReason, Request, RequestOutput, SamplingParams
from deepinfer.tokenizer import Tokenizer


class LLM:
    """A model in this process.

    Example::

        llm = LLM("nano")
        print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=32))[0])
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
            model: checkpoint directory, or ``nano``.
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
        loaded = load(args, progress=progress)
        self.args = args
        self.config = loaded.config
        self.decode_sequence = decode_sequence
        self._tokenizer = loaded.tokenizer
        self._reader = PromptReader(args, loaded.config, loaded.tokenizer)
        self._core: EngineCore | None = loaded.core
        self._observer = Observer(loaded.core.stats, log_every=None if args.disable_log_stats else args.logging_interval_steps)
        self._boxes: dict[str, deque[RequestOutput]] = {}  # unfinished request -> records that nobody has taken yet
        self._numbers = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def close(self) -> None:
        """Give the model's memory back; the object cannot be used afterwards."""
        if self._core is not None:
            self._core.close()
        self._core = None

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
            sampling_params: one for all, or one per prompt.  Without a seed every prompt draws its own, also where they share one
                object; with one, the same prompt gives the same text.
            prompt_token_ids: ids instead of texts (they win where both are given); equal lengths if both.  Lists or arrays.
            use_tqdm: show progress.
            multi_modal_data: per prompt ``{"image_bytes": [file contents…]}``, optionally with ``image_sizes``, the (width,
                height) that each picture must have.

        Returns:
            Texts in the order of the prompts, or with ``decode_sequence=False`` the records of each text's tokens.  The ``n``
            answers to a prompt stand side by side.

        Raises:
            RequestError: a prompt or a parameter is not usable; nothing was generated.
            ContextTooLong: a prompt is too long.
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
        ready = self._reader.prompts(prompts, prompt_token_ids, multi_modal_data)
        params = params_for_each(sampling_params, len(ready))
        core = self._running()
        request_ids: list[str] = []
        try:
            for prompt, each in zip(ready, params, strict=True):
                request_ids.append(self._add(core, prompt, each))
            unfinished = set(request_ids)
            with progress_bar(len(request_ids), unit="prompt", desc="generating", shown=use_tqdm) as bar:
                while unfinished:
                    last = {output.request_id for output in self._turn(core) if output.finished} & unfinished
                    ended = {request_id for request_id in last if not core.is_unfinished(request_id)}
                    unfinished -= ended
                    bar.update(len(ended))
            answers: list[list[RequestOutput]] = []
            for request_id, each in zip(request_ids, params, strict=True):
                answers += _by_sample(self._boxes[request_id], each.n)
            return answers
        finally:
            self._end(core, request_ids)

    def completions(
        self, prompt_token_ids: Sequence[Iterable[int]], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[tuple[int, list[list[RequestOutput]]], None, None]:
        """Complete every prompt and hand each out as soon as it is complete; closing the iterator ends the others.

        Yields:
            The prompt's number from 0, and the records of its ``n`` answers; in the order in which prompts are completed.

        Raises:
            RequestError: a prompt or a parameter is not usable; nothing was generated.
        """
        ready = self._reader.prompts(None, prompt_token_ids, None)
        params = params_for_each(sampling_params, len(ready))
        core = self._running()
        numbers: dict[str, int] = {}  # of unfinished requests
        request_ids: list[str] = []
        try:
            for number, (prompt, each) in enumerate(zip(ready, params, strict=True)):
                request_ids.append(self._add(core, prompt, each))
                numbers[request_ids[-1]] = number
            candidates: Iterable[str] = ()
            while numbers:
                ended = [each for each in candidates if each in numbers and not core.is_unfinished(each)]
                for request_id in ended:
                    number = numbers.pop(request_id)
                    yield number, _by_sample(self._boxes[request_id], params[number].n)
                # Whoever iterates may have turned the engine meanwhile: then the outputs of one turn of ours are not all.
                candidates = list(numbers) if ended else {output.request_id for output in self._turn(core) if output.finished}
        finally:
            self._end(core, request_ids)

    def stream(self, prompt: str, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, token by token; closing the iterator ends the request.  ``n`` answers come mixed.

        Several streams may be open, and :meth:`generate` may run meanwhile: each gets its own records.
        """
        ready = self._reader.of_text(prompt)
        core = self._running()
        (params,) = params_for_each(sampling_params, 1)
        request_id = self._add(core, ready, params)
        box = self._boxes[request_id]
        num_open = params.n
        try:
            while num_open:
                if not box:
                    self._turn(core)
                while box:
                    output = box.popleft()
                    num_open -= output.finished
                    yield output
        finally:
            self._end(core, [request_id])

    def prompt_ids(self, text: str) -> list[int]:
        """Ids that :meth:`generate` makes of a text; raises :class:`ContextTooLong` where they are too many."""
        return self._reader.text_ids(text)

    def text(self, records: Iterable[RequestOutput]) -> str:
        """The text of a request's records, without the token that ended it."""
        return self._tokenizer.decode([token_id for each in records if (token_id := self.text_token(each)) is not None])

    def text_token(self, record: RequestOutput) -> int | None:
        """The token of a record that belongs to the text: neither the end token nor the stop token that ended the answer."""
        is_end = record.finish_reason == FinishReason.STOP or record.token_id == self.config.eos_token_id
        return None if is_end else record.token_id

    def _running(self) -> EngineCore:
        if self._core is None:
            raise ConfigError("this LLM was closed; make a new one")
        return self._core

    def _add(self, core: EngineCore, prompt: Prompt, params: SamplingParams) -> str:
        request_id = str(next(self._numbers))
        request = Request(request_id=request_id, prompt_token_ids=prompt.token_ids, params=params, images=dict(prompt.images))
        core.add(request, prompt.pictures)
        self._observer.arrived(request, time.monotonic())
        self._boxes[request_id] = deque()
        return request_id

    def _turn(self, core: EngineCore) -> list[RequestOutput]:
        """One turn of the engine; every record goes to its request's box, too."""
        start = time.monotonic()
        outputs = core.step()
        now = time.monotonic()
        self._observer.stepped(outputs, now - start, now)
        for output in outputs:
            self._boxes[output.request_id].append(output)
        return outputs

    def _end(self, core: EngineCore, request_ids: Iterable[str]) -> None:
        """Forget requests, ended or not."""
        unfinished = [request_id for request_id in request_ids if core.is_unfinished(request_id)]
        core.abort(unfinished)
        self._observer.aborted(unfinished)
        for request_id in request_ids:
            del self._boxes[request_id]


def _by_sample(records: Iterable[RequestOutput], num_samples: int) -> list[list[RequestOutput]]:
    """Records of each answer."""
    answers: list[list[RequestOutput]] = [[] for _ in range(num_samples)]
    for record in records:
        answers[record.sample_idx].append(record)
    return answers
