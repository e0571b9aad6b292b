"""Operators: a signature, a torch body that defines the numbers, and backends that register faster bodies.

``@op`` makes a module-level function an operator.  A call runs the bound implementation; before :func:`bind` this is the
decorated body.  A backend registers its bodies with ``@family.name.implement("backend")``.  :func:`bind` binds all operators to
one backend, once, before the model is built.

Invariant: after ``bind(b)`` every operator runs its ``b`` implementation.  A missing implementation is an error; there is no
fallback.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, ParamSpec, TypeAlias, TypeVar

from deepinfer.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "torch"
_REGISTRY: dict[str, Op] = {}  # type: ignore[type-arg]
_bound = [REFERENCE]
_log = logging.getLogger(__name__)

CodeFormat = Literal["mxfp8", "mxfp4", "window", "main", "index"]
"""Format of a result that consists of codes: quantised activations (``mxfp8``), values on the grid of index queries (``mxfp4``),
or a record."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The tolerance of a result whose elements are codes of a number format: few elements differ, each by one code.

    Rounding turns a tiny difference of its argument into a whole step.  So the size of a difference says nothing about such a
    result; the number of differing elements does.

    One code is one step of the format at the element.  Steps of E4M3 grow with the element; the block's scale gives the smallest
    step.  Quantised activations may have one scale per 128 elements instead of one per 32.  The coarser scale changes only small
    elements.  So elements below 2^-6 of the coarser scale are not counted, but each may differ by one step of that scale at most.
    The scales of a record are part of the format.  They may differ only where rounding decides: a power of two if the block's
    largest element lies on the border of two scales, and an E4M3 scale by one code in the same share of blocks.

    Attributes:
        format: format of the result.
        share: share of the elements that may differ.  One element may always differ, unless the share is 0.
    """

    format: CodeFormat
    share: float


Tolerance: TypeAlias = float | Codes
"""A number is the largest difference relative to the row's RMS, plus one step of the result's dtype; 0 means equal bits.

The step allows for the rounding of the result: a tiny difference before the rounding may change the result by one step."""


class Op(Generic[P, R]):
    """One operator; calls go to the bound implementation.

    Attributes:
        name: ``family.function``.
        reference: the decorated torch body.
        tolerance: how much a backend may differ from the reference; one for all outputs, or one for each output.
        implementations: backend name -> body.
    """

    def __init__(self, body: Callable[P, R], tolerance: Tolerance | tuple[Tolerance, ...]) -> None:
        functools.update_wrapper(self, body)
        self.name = f"{body.__module__.rsplit('.', 1)[-1]}.{body.__name__}"
        self.reference = body
        self.tolerance = tolerance
        self.implementations: dict[str, Callable[P, R]] = {REFERENCE: body}
        self._bound = body

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._bound(*args, **kwargs)

    def implement(self, backend: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a body for ``backend``; the signature is the operator's own."""

        def register(body: Callable[P, R]) -> Callable[P, R]:
            if backend in self.implementations:
                raise AssertionError(f"{self.name} has two implementations for backend {backend!r}")
            self.implementations[backend] = body
            return body

        return register

    def bind(self, backend: str) -> None:
        """Route calls to ``backend``'s body (which must exist)."""
        self._bound = self.implementations[backend]

    @contextlib.contextmanager
    def wrapped(self, wrap: Callable[[Callable[P, R]], Callable[P, R]]) -> Iterator[None]:
        """Route calls to ``wrap(bound body)`` until the context ends; for measurements, while nothing else uses the operators."""
        bound, self._bound = self._bound, wrap(self._bound)
        try:
            yield
        finally:
            self._bound = bound


def op(*, tolerance: Tolerance | tuple[Tolerance, ...]) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a torch function an operator; ``tolerance`` is a tuple if outputs have different ones.  A comment justifies it."""

    def wrap(body: Callable[P, R]) -> Op[P, R]:
        made = Op(body, tolerance)
        _REGISTRY[made.name] = made
        return made

    return wrap


def registered() -> dict[str, Op]:  # type: ignore[type-arg]
    """All operators by name, in order of definition."""
    return dict(_REGISTRY)


def bound() -> str:
    """The backend that all operators are bound to."""
    return _bound[0]


def bind(backend: str) -> None:
    """Bind every operator to ``backend``.

    Raises:
        ConfigError: an operator has no body for it; names all such operators.
    """
    missing = sorted(name for name, each in _REGISTRY.items() if backend not in each.implementations)
    if missing:
        known = sorted(set.intersection(*(set(each.implementations) for each in _REGISTRY.values())))
        raise ConfigError(f"backend {backend!r} lacks kernels for {', '.join(missing)}; complete backends are {', '.join(known)}")
    _bound.append(backend)
    del _bound[:-1]
    for name, each in _REGISTRY.items():
        each.bind(backend)
        _log.debug("op %s -> %s", name, backend)
