"""A prepared data folder of random bytes for the byte tokenizer of `testing.models`."""

from pathlib import Path

from ar2diff.data.documents import Document
from ar2diff.data.shards import ShardWriter
from ar2diff.data.tokenize import TokenizedDocument
from ar2diff.seeding import keyed_generator
from ar2diff.testing.models import END_ID


def write_tiny_shard(folder: Path, *, num_documents: int = 40, max_len: int = 40, seed: int = 0) -> Path:
    """A finished shard of documents of 8 to `max_len` tokens; returns `folder`."""
    generator = keyed_generator("tiny shard", seed)
    with ShardWriter(folder) as writer:
        for idx in range(num_documents):
            length = int(generator.integers(8, max_len + 1))
            prompt_len = int(generator.integers(1, length - 4))
            token_ids = [*generator.integers(97, 123, length - 1).tolist(), END_ID]
            document = Document(id=str(idx), prompt=(), response="", source=f"tiny#{idx}")
            writer.add(document, TokenizedDocument(token_ids, prompt_len))
        writer.finish({"eos_token_id": END_ID, "files": writer.finish_arrays()})
    return folder
