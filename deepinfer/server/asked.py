"""What a request asks the engine for, and the interfaces between protocols, engine and transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy.typing as npt

from deepinfer.engine import ipc
from deepinfer.engine.client import EngineStats, Take
from deepinfer.request import RequestOutput, SamplingParams
from deepinfer.server.failures import HttpError

DONE: Final = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's."""


def data_frame(data: bytes) -> bytes:
    """An event without a name."""
    return b"data: " + data + b"\n\n"


class Engine(Protocol):
    """The part of :class:`deepinfer.engine.client.AsyncEngineClient` that the server uses; tests replay recorded answers."""

    @property
    def facts(self) -> ipc.Ready:
        """Facts that the core sends when it is ready."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine answers requests."""

    async def follow(
        self,
        request_id: str,
        prompt_token_ids: npt.ArrayLike,
        params: SamplingParams,
        images: Sequence[bytes] = (),
        *,
        take: Take,
        priority: int = 0,
        salt: bytes = b"",
    ) -> None:
        """Generate answers for one prompt; ``take`` gets the records of each step when they arrive."""

    async def stats(self) -> EngineStats:
        """The engine's counts."""


class Writer(Protocol):
    """Turns the records of one HTTP request into its answer, for one protocol.

    Attributes:
        is_stream: whether the answer is a stream of events.
    """

    is_stream: bool

    def is_complete(self, prompt_idx: int) -> bool:
        """Whether the answers to a prompt need no more records, although the engine may make more."""

    def push(self, prompt_idx: int, records: Sequence[RequestOutput]) -> bytes:
        """Take the records of a step; returns the events that they complete, or b"" if the answer is not streamed."""

    def finish(self) -> bytes:
        """The last events of a stream, or the whole answer."""

    def fail(self, error: HttpError, request_id: str) -> bytes:
        """The events that end a stream with an error."""

    def close(self) -> None:
        """Release everything; no method may be called afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One HTTP request in the engine's terms.

    Attributes:
        model: the model's name in the request.
        prompts: token ids of each prompt.
        params: sampling parameters of all prompts.
        images: encoded files, in the order of the placeholders in the only prompt.
        salt: the tenant that the body names; b"" for none.
        writer: makes the answer.
        left_out: tools that only a vendor runs and that are therefore left out.
    """

    model: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    writer: Writer
    images: Sequence[bytes] = ()
    salt: bytes = b""
    left_out: Sequence[str] = ()
