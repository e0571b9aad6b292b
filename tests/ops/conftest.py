"""Fixtures of the operators' tests."""

from tests.devices import device

__all__ = ["device"]
