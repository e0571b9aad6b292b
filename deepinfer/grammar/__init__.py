"""Grammars of structured outputs: compiling, and masks of allowed tokens.  Does not import torch."""
