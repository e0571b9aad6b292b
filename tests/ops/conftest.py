"""Fixtures of the operators' tests."""

import pytest

from deepinfer.ops import op
from tests.devices import device

__all__ = ["device"]


@pytest.fixture(scope="module", autouse=True)
def starting_backend():
    """Operators are tested with the reference bound; see the fixture of the same name for all tests."""
    op.bind(op.REFERENCE)
