"""Block diffusion in llama.cpp, through a binding of its C API: two kinds of passes over one cache.

A causal pass writes clean tokens into the cache. A pass without the causal mask lets a block of masks look at itself
and at every cell before it; its cells are taken out again. `ar2diff export --to gguf` writes the file, and the
metadata in it says how a block is run.

Run: pip install cyllama && python examples/llama_cpp_blocks.py mine-gguf/model.gguf "Write the order as JSON ..."
Shape letters: S block, V vocabulary.
"""

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import gguf
import numpy as np
from cyllama.llama import llama_cpp
from numpy.typing import NDArray

Logits = NDArray[np.float64]
UNUSED = 5  # the token type of rows that no text has


class Model(llama_cpp.LlamaModel):
    @property
    def n_vocab(self) -> int:  # the binding's logits ask for it, and the binding lacks it
        return int(self.get_vocab().n_vocab)


class BlockDecoder:
    def __init__(self, path: Path, *, context_len: int = 1024, threads: int = 1) -> None:
        stored = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
        self.block_size = int(stored["ar2diff.block_size"])
        self.shift = bool(stored["ar2diff.shift_logits"])
        self.clean_is_causal = stored["ar2diff.clean_attention"] == "causal"
        self.mask = int(stored["tokenizer.ggml.mask_token_id"])
        ends = (stored.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        self.ends = {int(idx) for idx in ends if idx is not None}
        self.banned = [self.mask, *np.flatnonzero(np.asarray(stored["tokenizer.ggml.token_type"]) == UNUSED)]
        llama_cpp.disable_logging()
        self.model = Model(str(path), llama_cpp.LlamaModelParams())
        settings = llama_cpp.LlamaContextParams()
        # A pass without the causal mask must fit into one physical batch.
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context_len
        settings.n_threads = settings.n_threads_batch = threads
        # Nothing is rounded on the way: the cache in f32, and no flash attention, which halves precision.
        settings.type_k = settings.type_v = int(gguf.GGMLQuantizationType.F32)
        settings.flash_attn_type = 0
        self.context = llama_cpp.LlamaContext(self.model, settings)
        self.batch = llama_cpp.LlamaBatch(n_tokens=context_len, embd=0, n_seq_max=1)
        self.length = 0

    def read(self, ids: Sequence[int], *, causal: bool, rows: Sequence[int]) -> Logits:
        """Put tokens behind those in the cache; the logits of some of them, (rows, V)."""
        self.batch.clear()
        for idx, token_id in enumerate(ids):
            self.batch.add(token_id, self.length + idx, [0], idx in rows)
        self.context.set_causal_attn(causal)
        self.context.decode(self.batch)
        logits = np.array([self.context.get_logits_ith(row) for row in rows])
        logits[:, self.banned] = -np.inf
        return logits

    def commit(self, ids: Sequence[int], *, causal: bool) -> Logits:
        """Keep clean tokens in the cache; the logits after the last one, (V,)."""
        last_V = self.read(ids, causal=causal, rows=[len(ids) - 1])[0]
        self.length += len(ids)
        return last_V

    def draft(self, block: Sequence[int]) -> Logits:
        """The logits of every row of a block that sees itself and the cache, (S, V); the cache stays as it was."""
        logits_SV = self.read(block, causal=False, rows=range(len(block)))
        self.context.memory_seq_rm(0, self.length, -1)
        return logits_SV

    def start(self, prompt_ids: Sequence[int]) -> Logits:
        """Read a prompt into an empty cache; the logits after it, (V,)."""
        self.context.memory_seq_rm(0, -1, -1)
        self.length = 0
        return self.commit(prompt_ids, causal=True)

    def decode_tokens(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer one token a pass, without its end of turn."""
        last_V, answer = self.start(prompt_ids), list[int]()
        while len(answer) < max_tokens and (token_id := int(last_V.argmax())) not in self.ends:
            answer.append(token_id)
            last_V = self.commit([token_id], causal=True)
        return answer

    def decode_blocks(self, prompt_ids: Sequence[int], max_tokens: int, denoising_steps: int) -> list[int]:
        """The greedy answer block by block, without its end of turn: the most confident tokens of each pass stay."""
        last_V, answer = self.start(prompt_ids), list[int]()
        while True:
            block = [self.mask] * self.block_size
            if self.shift:  # the causal path already knows the block's first token
                block[0] = int(last_V.argmax())
            self.denoise(block, max_tokens - len(answer), denoising_steps)
            kept = list(takewhile(lambda token_id: token_id not in self.ends, block))
            answer += kept
            if len(kept) < len(block) or len(answer) >= max_tokens:
                return answer[:max_tokens]
            last_V = self.commit(block, causal=self.clean_is_causal)

    def denoise(self, block: list[int], wanted: int, denoising_steps: int) -> None:
        """Replace the masks left of an end of turn, a share of them a pass."""
        for passes_left in range(denoising_steps, 0, -1):
            end = next((idx for idx, token_id in enumerate(block) if token_id in self.ends), len(block))
            masked = [idx for idx in range(min(end, wanted)) if block[idx] == self.mask]
            if not masked:
                return
            logits_SV = self.draft(block)
            if self.shift:  # the row left of a place predicts it
                logits_SV = np.roll(logits_SV, 1, axis=0)
            top_S = logits_SV.max(axis=1)
            confidence_S = 1 / np.exp(logits_SV - top_S[:, None]).sum(axis=1)
            surest = sorted(masked, key=lambda idx: -confidence_S[idx])
            for idx in surest[: -(-len(masked) // passes_left)]:
                block[idx] = int(logits_SV[idx].argmax())


def main(path: Path, prompt: str) -> None:
    decoder = BlockDecoder(path)
    words = decoder.model.get_vocab()
    chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = words.tokenize(chat, add_special=False, parse_special=True)
    print(words.detokenize(decoder.decode_blocks(prompt_ids, max_tokens=64, denoising_steps=4)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
