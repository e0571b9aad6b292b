"""Decides each step, without tensors and without waiting."""
