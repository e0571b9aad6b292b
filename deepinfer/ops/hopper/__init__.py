"""Kernels for sm_90a; the only folder that imports kernel libraries.  Importing it registers those bodies that exist so far.

The backend is bound as a whole, so that until every operator has a body here, ``bind("hopper")`` names those that lack one.
"""

from deepinfer.ops.hopper import sampling

__all__ = ["sampling"]
