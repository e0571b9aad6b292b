"""Operators: a signature, a torch body that defines the numbers, and backends that register faster bodies.

``@op`` makes a module-level function an operator; calling it runs the bound implementation, which is the decorated body until
:func:`bind` says otherwise.  A backend registers with ``@family.name.implement("backend")`` and is bound as a whole, once, before
the model is built.

Invariant: after ``bind(b)`` every operator runs its ``b`` implementation; a missing one is an error, never a fallback.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from deepinfer.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "torch"
_REGISTRY: dict[str, Op] = {}  # type: ignore[type-arg]
_log = logging.getLogger(__name__)


class Op(Generic[P, R]):
    """One operator; calls go to the bound implementation.

    Attributes:
        name: ``family.function``.
        reference: the decorated torch body.
        tolerance: largest difference a backend may show, relative to the row's RMS; 0 means bit-equal.
        implementations: backend name -> body.
    """

    def __init__(self, body: Callable[P, R], tolerance: float) -> None:
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


def op(*, tolerance: float) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a torch function an operator; ``tolerance`` is relative to a row's RMS and justified beside the body."""

    def wrap(body: Callable[P, R]) -> Op[P, R]:
        made = Op(body, tolerance)
        _REGISTRY[made.name] = made
        return made

    return wrap


def registered() -> dict[str, Op]:  # type: ignore[type-arg]
    """All operators by name, in order of definition."""
    return dict(_REGISTRY)


def bind(backend: str) -> None:
    """Bind every operator to ``backend``.

    Raises:
        ConfigError: an operator has no body for it; names all such operators.
    """
    missing = sorted(name for name, each in _REGISTRY.items() if backend not in each.implementations)
    if missing:
        known = sorted(set.intersection(*(set(each.implementations) for each in _REGISTRY.values())))
        raise ConfigError(f"backend {backend!r} lacks kernels for {', '.join(missing)}; complete backends are {', '.join(known)}")
    for name, each in _REGISTRY.items():
        each.bind(backend)
        _log.debug("op %s -> %s", name, backend)
