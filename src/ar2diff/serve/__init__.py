"""The OpenAI-compatible server: strict requests in, settled text out, one engine thread behind a bounded queue."""
