"""Operators: mathematics with a signature.  Bodies in this folder are the reference backend; other backends are subfolders."""
