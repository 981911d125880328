"""Documents of a prepared folder as people read them: prompt, response, and where the blocks of training begin."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ar2diff.data.shards import IDS_NAME, REMOVED_NAME, TokenShard
from ar2diff.errors import ConfigError, DataError
from ar2diff.tokenizer import Tokenizer


class ShownDocument(NamedTuple):
    """One document.

    Args:
        prompt: its text with control tokens; these tokens carry no loss.
        blocks: the response, cut where training cuts it: every `block_size` tokens from its first one on. All of
            its tokens carry the loss, the end token too. A character whose bytes lie in two blocks shows as U+FFFD.
    """

    id: str
    source: str
    prompt: str
    blocks: tuple[str, ...]
    prompt_len: int
    num_tokens: int


def read_documents(folder: Path, tokenizer: Tokenizer, *, block_size: int, start: int = 0) -> Iterator[ShownDocument]:
    """The documents from number `start` on.

    Raises:
        ConfigError: `block_size` is below 1, or `start` is outside.
        DataError: the folder is not finished or damaged, or the tokenizer is another one.
    """
    shard = TokenShard(folder)
    if block_size < 1:
        raise ConfigError("block_size is below 1", given=block_size, fix="Give the block size of the training")
    if not 0 <= start < len(shard):
        raise ConfigError("no document has this number", given=start, fix=f"Stay below {len(shard)}")
    if shard.receipt["eos_token_id"] != tokenizer.eos_token_ids[0]:
        raise DataError("the folder was made with another tokenizer", given=str(folder), fix="Name that model folder")
    with (folder / IDS_NAME).open(encoding="utf-8") as stream:
        for index, line in enumerate(islice(stream, start, None), start):
            yield _read_document(shard, index, json.loads(line), tokenizer, block_size)


def _read_document(
    shard: TokenShard, index: int, entry: dict[str, Any], tokenizer: Tokenizer, block_size: int
) -> ShownDocument:
    begin, end = (int(shard.document_offsets[place]) for place in (index, index + 1))
    token_ids, prompt_len = shard.token_ids[begin:end].tolist(), int(shard.prompt_lens[index])
    response = token_ids[prompt_len:]
    cuts = range(0, len(response), block_size)
    return ShownDocument(
        id=entry["id"],
        source=entry["source"],
        prompt=tokenizer.decode(token_ids[:prompt_len], skip_special=False),
        blocks=tuple(tokenizer.decode(response[cut : cut + block_size], skip_special=False) for cut in cuts),
        prompt_len=prompt_len,
        num_tokens=len(token_ids),
    )


def read_removed(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of all rows that are not trained on, in order."""
    with (folder / REMOVED_NAME).open(encoding="utf-8") as stream:
        yield from map(json.loads, stream)
