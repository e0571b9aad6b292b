"""Benchmarks of this machine.  Each reports what it ran, its results, and the limits of the machine where they are known."""
