"""Thinking and calls in an answer: read off its tokens in the model's own format, which its chat template shows."""
