"""Memory of past tokens: what is kept, who holds it, and the tensors behind it."""
