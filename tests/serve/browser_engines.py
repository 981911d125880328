"""Engines whose answers a picture of the page can show."""

from dataclasses import replace

from ar2diff.engine.generation import Generation, Pass, Reveal

LETTERS = {idx: -100.0 for idx in range(260) if not (idx == 32 or 97 <= idx <= 122)}


class Spelling:
    """A real engine that is held to small letters, so that a picture of it can be read."""

    def __init__(self, engine):
        self.loaded, self.scheduler, self._inner = engine.loaded, self, engine.scheduler
        self.capacity, self.step, self.remove = self._inner.capacity, self._inner.step, self._inner.remove
        self.kv_use = 0.0

    def add(self, key, request):
        self._inner.add(key, replace(request, logit_bias=LETTERS))


class Saying:
    """An engine whose every answer is one text, revealed in a single block of two passes."""

    capacity = 1
    kv_use = 0.0

    def __init__(self, loaded, text):
        self.loaded, self.text, self.scheduler = loaded, text, self

    def add(self, key, request):
        self._key, self._steps = key, self._answer()

    def remove(self, key):
        self._steps = iter(())

    def step(self):
        return [(self._key, step) for step in [next(self._steps, None)] if step]

    def _answer(self):
        ids = tuple(self.text.encode())
        reveals = [Reveal(position=idx, token_id=token_id, logprob=-0.1) for idx, token_id in enumerate(ids)]
        half = tuple(token_id if idx % 2 else None for idx, token_id in enumerate(ids))
        common = {"block_idx": 0, "start": 0}
        yield Pass(**common, pass_idx=0, token_ids=half, reveals=tuple(reveals[1::2]), text="")
        whole = Generation(
            token_ids=ids,
            text=self.text,
            finish_reason="stop",
            logprobs=(0.0,) * len(ids),
            num_forward_passes=2,
            num_prefill_passes=0,
            passes_per_block=(2,),
            drafted_by_offset=(),
            accepted_by_offset=(),
            prefill_s=0.1,
            decode_s=0.5,
        )
        last = Pass(**common, pass_idx=1, token_ids=ids, reveals=tuple(reveals[::2]), text=self.text)
        yield replace(last, generation=whole)
