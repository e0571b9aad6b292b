"""Decides each step.  No tensors, no clock, no sleeping."""
