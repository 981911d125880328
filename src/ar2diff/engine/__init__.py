"""Decoding: a slow reference and the fast engine that equals it."""
