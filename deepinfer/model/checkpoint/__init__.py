"""The published checkpoint format: the table of tensors, the reader, the writer, and random weights."""
