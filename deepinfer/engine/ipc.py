"""Framing between a client and the core process: what is said, and as which bytes.

A message is a MessagePack array in the first frame of a ZeroMQ multipart message; bulk (token ids, images) follows in frames of
its own and is never copied into it.  Both ends are DEALER sockets with one peer, in a private folder.

No queue has a limit, because what can be in one has: the core sends at most ``max_tokens`` records for an answer, so a client
that does not read holds up nobody and costs no more memory than the outputs it asked for.

Beside the socket runs the *lifeline*, a pair of connected stream sockets: when a process ends, however it ends, the other one
reads the end of the stream at once, unless a fork has inherited an end; so each side watches the other's process, too.  The
core's last words travel on it, because a thread that finds the loop stuck cannot use
the loop's socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from deepinfer import errors
from deepinfer.errors import EngineError, StepFailed, reason
from deepinfer.metrics import Snapshot
from deepinfer.request import RequestOutput
from deepinfer.scheduler.stats import SchedulerStats

Frame = bytes | memoryview
ID_BYTES: Final = 4


class Message(msgspec.Struct, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of all messages; a subclass's tag is its first element on the wire."""


# From the client.


class Add(Message, tag="add", frozen=True):
    """Serve a request.  Frames behind it: token ids as int32, then the encoded images.

    Attributes:
        number: the client's name for the request, never used again; a request id may be.
        request_id: the caller's name for it.
        params: sampling parameters that differ from their defaults.
        priority: the higher is admitted first.
        salt: requests share cached memory only with requests of the same salt.
        arrived_s: when it came, by the clock that all processes of a machine share.
    """

    number: int
    request_id: str
    params: dict[str, Any]
    priority: int
    salt: bytes
    arrived_s: float


class Abort(Message, tag="abort", frozen=True):
    """Drop requests; answered by :class:`Aborted` with the same ``call`` unless that is 0."""

    call: int
    numbers: list[int]


class AskStats(Message, tag="ask", frozen=True):
    """Answered by :class:`Stats`."""

    call: int


class Shutdown(Message, tag="shutdown", frozen=True):
    """Take no more requests, finish those there are for at most so many seconds, abort the rest, end."""

    finish_within_s: float


# From the core.


class Ready(Message, tag="ready", frozen=True):
    """The model is loaded.

    Attributes:
        max_model_len: prompt plus output tokens of one request.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens of one step.
        ignore_len: tokens from which a prompt is not looked at.
        vocab_size: token ids are below it.
        eos_token_id: ends a request that does not ignore it.
        pid: of the core's process, which may have been started by another program.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ignore_len: int
    vocab_size: int
    eos_token_id: int
    pid: int


class Outputs(Message, tag="outputs", frozen=True):
    """What one step brought: ``records[i]`` belongs to request ``numbers[i]``.

    Records travel as maps, not arrays: decoded straight into the class that callers get, 256 of them take 0.12 ms instead of the
    0.56 ms of arrays that have to be turned into it, for 68 kB instead of 11.
    """

    numbers: list[int]
    records: list[RequestOutput]


class Refused(Message, tag="refused", frozen=True):
    """A request that cannot be served: the name of its error and its sentence."""

    number: int
    kind: str
    sentence: str


class Aborted(Message, tag="aborted", frozen=True):
    """How many requests an abort found, and how many tokens they had."""

    call: int
    count: int
    tokens: int


class Stats(Message, tag="stats", frozen=True):
    """What the scheduler counts, and metrics."""

    call: int
    scheduler: SchedulerStats
    metrics: Snapshot


class Closed(Message, tag="closed", frozen=True):
    """The core's last message; ``aborted`` are the requests that did not finish."""

    aborted: list[int]


class LastWords(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Why a core process ends, on the lifeline."""

    kind: str
    sentence: str


FromClient = Add | Abort | AskStats | Shutdown
FromCore = Ready | Outputs | Refused | Aborted | Stats | Closed

_encode: Final = msgspec.msgpack.Encoder().encode
_from_client: Final = msgspec.msgpack.Decoder(FromClient)
_from_core: Final = msgspec.msgpack.Decoder(FromCore)
_last_words: Final = msgspec.msgpack.Decoder(LastWords)


def pack(message: Message, bulk: Sequence[Frame] = ()) -> list[Frame]:
    """Frames of a message."""
    return [_encode(message), *bulk]


def from_client(frames: Sequence[Frame]) -> tuple[FromClient, Sequence[Frame]]:
    """What a client said, and its bulk."""
    return _from_client.decode(frames[0]), frames[1:]


def from_core(frames: Sequence[Frame]) -> FromCore:
    """What the core said."""
    return _from_core.decode(frames[0])


def pack_ids(token_ids: npt.ArrayLike) -> bytes:
    """Token ids as a frame; raises ``ValueError`` for what is no flat array of integers of 32 bits."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError("not a list of whole numbers")
    if array.size and not (array.min() >= -(2**31) and array.max() < 2**31):
        raise ValueError("a number needs more than 32 bits")
    return np.ascontiguousarray(array, dtype="<i4").tobytes()


def unpack_ids(frame: Frame) -> npt.NDArray[np.int32]:
    """The token ids of a frame: [num_tokens] int32."""
    return np.frombuffer(frame, dtype="<i4") if len(frame) else np.empty(0, dtype=np.int32)


def pack_last_words(error: BaseException) -> bytes:
    """An error for the lifeline."""
    kind = type(error).__name__ if isinstance(error, EngineError) else StepFailed.__name__
    sentence = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {reason(error)}"
    return _encode(LastWords(kind=kind, sentence=sentence))


def unpack_last_words(data: bytes) -> EngineError | None:
    """The error of :func:`pack_last_words`; None if the core ended without a word."""
    if not data:
        return None
    words = _last_words.decode(data)
    return error_of(words.kind, words.sentence)


def error_of(kind: str, sentence: str) -> EngineError:
    """An error by the name of its class."""
    error = getattr(errors, kind)(sentence)
    assert isinstance(error, EngineError), "only our own errors cross the border"
    return error
