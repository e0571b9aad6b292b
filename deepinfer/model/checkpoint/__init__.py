"""The published checkpoint: what a model directory holds, how it is read and written, and random weights for one."""
