"""Runs the steps of the scheduler's plans on the devices."""
