"""Kernels for sm_90a; the only folder that imports kernel libraries.  The import registers the bodies.

``bind("hopper")`` binds all operators.  If an operator has no body here, it raises an error with the name of the operator.
"""

from deepinfer.ops.hopper import sampling

__all__ = ["sampling"]
