"""Kernels in C for the processor of this machine; the import registers the bodies of the backend ``cpu``.

They are compiled once, on first use, by the system's compiler (:mod:`~deepinfer.ops.cpu.library`).
"""

from deepinfer.ops.cpu.bodies import NAME
from deepinfer.ops.cpu.library import is_available

__all__ = ["NAME", "is_available"]
