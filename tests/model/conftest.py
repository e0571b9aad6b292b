"""Fixtures of the model's tests."""

from tests.devices import device

__all__ = ["device"]
