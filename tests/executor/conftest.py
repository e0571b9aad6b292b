"""Fixtures of the executor's tests."""

from tests.devices import device

__all__ = ["device"]
