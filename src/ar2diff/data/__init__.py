"""Training data: sources to documents, documents to token shards, shards to rows, each with its receipt."""
