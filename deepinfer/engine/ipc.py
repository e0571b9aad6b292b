"""Messages between a client and the core process, and their encoding.

A message is a MessagePack array in the first frame of a ZeroMQ multipart message.  Bulk data (token ids, images) follows in
separate frames and is never copied into the first frame.  Both ends are DEALER sockets with one peer, in a private folder.

Queues have no limit, because their content is limited: the core sends at most ``max_tokens`` records for an answer.  A client
that does not read delays no other request, and costs only the memory of the outputs that it asked for.

A second connection is the *lifeline*, a pair of connected stream sockets.  When a process ends in any way, the other process
reads the end of the stream at once.  A fork that has inherited the socket prevents that, so each side also watches the other's
process.  The core sends its last words on the lifeline, because a thread that finds the loop stuck cannot use the loop's socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Base of all messages; the tag of a subclass is the first element of its array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory that an engine has taken.

    Attributes:
        device: name of the device.
        weight_bytes: bytes of the weights.
        cache_bytes: bytes of all pages and slots.
        num_cache_tokens: tokens that the pages hold.
    """

    device: str
    weight_bytes: int
    cache_bytes: int
    num_cache_tokens: int


# Messages of the client.


class Add(Message, tag="add", frozen=True):
    """Serve a request.  The frames after it are the token ids as int32, then the encoded images.

    Attributes:
        number: the client's number of the request; it is never used again, unlike a request id.
        request_id: the caller's id of the request.
        params: sampling parameters that differ from their defaults.
        priority: requests of higher priority are admitted first.
        salt: requests share cached memory only with requests of the same salt.
        arrived_s: time of arrival on the monotonic clock, which all processes of a machine share.
    """

    number: int
    request_id: str
    params: dict[str, Any]
    priority: int
    salt: bytes
    arrived_s: float


class Abort(Message, tag="abort", frozen=True):
    """Abort requests.  The core answers with :class:`Aborted` and the same ``call``, unless ``call`` is 0."""

    call: int
    numbers: list[int]


class AskStats(Message, tag="ask", frozen=True):
    """Ask for counts.  The core answers with :class:`Stats` and the same ``call``."""

    call: int


class Shutdown(Message, tag="shutdown", frozen=True):
    """Take no more requests, finish open requests for at most ``finish_within_s`` seconds, abort the rest, and end."""

    finish_within_s: float


# Messages of the core.


class Ready(Message, tag="ready", frozen=True):
    """The model is loaded.

    Attributes:
        max_model_len: prompt plus output tokens of one request.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of one step.
        ignore_len: a prompt with this many tokens or more is refused unread.
        vocab_size: token ids are below it.
        eos_token_id: the token that ends a request without ``ignore_eos``.
        pid: process id of the core, which another program may have started.
        takes_images: whether the model has a vision tower.
        sampling_defaults: sampling parameters that the checkpoint recommends.
        memory: what the model and its caches take.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ignore_len: int
    vocab_size: int
    eos_token_id: int
    pid: int
    takes_images: bool
    sampling_defaults: dict[str, float]
    memory: Memory


class Outputs(Message, tag="outputs", frozen=True):
    """The records of one step: ``records[i]`` belongs to request ``numbers[i]``.

    Records are encoded as maps, not arrays, because maps decode directly into the class that callers get.  256 records take
    0.12 ms and 68 kB.  Arrays would need a conversion; they would take 0.56 ms and 11 kB.
    """

    numbers: list[int]
    records: list[RequestOutput]


class Refused(Message, tag="refused", frozen=True):
    """A request cannot be served: the class name of the error and its message."""

    number: int
    kind: str
    sentence: str


class Aborted(Message, tag="aborted", frozen=True):
    """Answer to :class:`Abort`: the number of requests that were open, and the number of their tokens."""

    call: int
    count: int
    tokens: int


class Stats(Message, tag="stats", frozen=True):
    """Answer to :class:`AskStats`: the scheduler's counts, and metrics."""

    call: int
    scheduler: SchedulerStats
    metrics: Snapshot


class Closed(Message, tag="closed", frozen=True):
    """The core's last message; ``aborted`` are the numbers of requests that did not finish."""

    aborted: list[int]


class LastWords(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Why a core process ends; sent on the lifeline."""

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
    """A client's message, and the frames of its bulk data."""
    return _from_client.decode(frames[0]), frames[1:]


def from_core(frames: Sequence[Frame]) -> FromCore:
    """The core's message."""
    return _from_core.decode(frames[0])


def pack_ids(token_ids: npt.ArrayLike) -> bytes:
    """Token ids as a frame; raises ``ValueError`` if they are not a flat array of integers of 32 bits."""
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
    """The bytes of an error for the lifeline."""
    kind = type(error).__name__ if isinstance(error, EngineError) else StepFailed.__name__
    sentence = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {reason(error)}"
    return _encode(LastWords(kind=kind, sentence=sentence))


def unpack_last_words(data: bytes) -> EngineError | None:
    """The error of :func:`pack_last_words`; None if the core ended without last words."""
    if not data:
        return None
    words = _last_words.decode(data)
    return error_of(words.kind, words.sentence)


def error_of(kind: str, sentence: str) -> EngineError:
    """Make an error from the name of its class and its message."""
    error = getattr(errors, kind)(sentence)
    assert isinstance(error, EngineError), "only our own errors cross the border"
    return error
