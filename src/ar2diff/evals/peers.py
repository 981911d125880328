"""Other programs that answer the same prompts: `transformers.generate`, and llama.cpp where it is installed."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ar2diff.clock import Clock
from ar2diff.errors import Ar2diffError
from ar2diff.evals.speed import Prompts, Timing

SCRIPT = Path(__file__).with_name("llama.mjs")


class AbsentError(Ar2diffError):
    """A contestant that cannot take part, and why."""


class TransformersRacer:
    """`transformers.generate` over a model folder, prompts of a batch filled up on the left.

    Raises:
        AbsentError: the package is not installed, or does not know the model.
    """

    name = "transformers.generate"

    def __init__(
        self,
        folder: Path,
        *,
        end_ids: Sequence[int],
        clock: Clock,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        try:
            import transformers
        except ImportError:
            raise AbsentError("transformers is not installed") from None
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise AbsentError(f"it cannot load the model: {' '.join(str(error).split())[:120]}") from None
        self._model = model.to(device).eval()
        self._library, self._clock, self._device = transformers, clock, device
        self._end_ids = list(end_ids)

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        """One call for all prompts; what an answer holds behind its end does not count."""
        longest = max(map(len, prompts))
        fill = self._end_ids[0]
        ids = [[fill] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        watch = _Watch(self._clock)
        with torch.inference_mode():
            found = self._model.generate(
                torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self._end_ids,
                pad_token_id=fill,
                stopping_criteria=self._library.StoppingCriteriaList([watch]),
            )
        answers = [_cut(row[longest:].tolist(), set(self._end_ids)) for row in found]
        return Timing(
            seconds=self._clock.seconds() - watch.start_s,
            first_s=watch.first_s,
            num_tokens=sum(map(len, answers)),
            # A request's part ends with its answer, the end of turn included.
            num_forward_passes=sum(min(len(answer) + 1, max_tokens) for answer in answers),
        )


class _Watch:
    """Asked after each token: keeps the first one's time."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.first_s = clock, 0.0
        self.start_s = clock.seconds()

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.first_s = self.first_s or self._clock.seconds() - self.start_s
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _cut(ids: list[int], ends: set[int]) -> list[int]:
    return ids[: next((place for place, idx in enumerate(ids) if idx in ends), len(ids))]


class LlamaRacer:
    """llama.cpp through the npm package node-llama-cpp, in a process of its own.

    Args:
        folder: holds node_modules/node-llama-cpp.
        gguf: the model, as its owner quantised it.
        num_sequences: the largest batch.
        num_places: KV places of each request.

    Raises:
        AbsentError: node, the package or the file is not there, or it does not load.
    """

    name = "llama.cpp"

    def __init__(
        self, folder: Path | None, gguf: Path | None, *, threads: int, num_sequences: int, num_places: int
    ) -> None:
        if reason := why_no_llama(folder, gguf):
            raise AbsentError(reason)
        sizes = (str(threads), str(num_sequences), str(num_places))
        self._child = subprocess.Popen(
            ["node", str(SCRIPT), str(folder), str(gguf), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.about = str(self._read()["ready"])
        except AbsentError:
            self.close()
            raise

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        """All prompts in sequences of one context.

        Raises:
            AbsentError: the process ended.
        """
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens}) + "\n")
        self._child.stdin.flush()
        reply = self._read()
        return Timing(
            seconds=reply["seconds"],
            first_s=sum(reply["first_s"]) / len(prompts),
            num_tokens=sum(reply["counts"]),
            num_forward_passes=sum(min(count + 1, max_tokens) for count in reply["counts"]),
        )

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise AbsentError(f"its process ended with status {self._child.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def why_no_llama(folder: Path | None, gguf: Path | None) -> str | None:
    """What llama.cpp lacks here, or None."""
    if gguf is None or not gguf.is_file():
        return "no GGUF file of the parent"
    if folder is None:
        return "no folder with node-llama-cpp was named"
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        return f"{folder.name} holds no node_modules/node-llama-cpp"
    return None if shutil.which("node") else "node is not installed"


@contextmanager
def closing(racers: Sequence[object]) -> Iterator[None]:
    """End the processes of those that have one."""
    try:
        yield
    finally:
        for racer in racers:
            if isinstance(racer, LlamaRacer):
                racer.close()
