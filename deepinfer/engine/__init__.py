"""Requests in, token streams out."""
