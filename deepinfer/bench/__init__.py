"""Measurements: what they ran, what they found, and how that compares with what the machine can do."""
