"""Memory of past tokens: layout, owners, prefix cache, and device tensors."""
