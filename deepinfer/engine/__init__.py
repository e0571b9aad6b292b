"""Takes requests and returns streams of tokens."""
