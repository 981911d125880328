"""Stages put together: quickstart and whole recipes."""
