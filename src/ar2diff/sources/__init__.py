"""Pinned downloads: a source names its bytes exactly, or it is refused."""
