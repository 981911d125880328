"""Our engine as a model of lm-evaluation-harness (`lm-eval`), in process: any of its tasks, in any of our modes.

    from lm_eval import simple_evaluate
    simple_evaluate(model=HarnessModel(engine, mode=VERIFIED_MODE), tasks=["arc_easy"])

Answers equal those that `lm-eval`'s `local-completions` and `local-chat-completions` get from `ar2diff serve`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from typing_extensions import override

from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError, ConfigError
from ar2diff.evals.modes import AR_MODE, EvalMode
from ar2diff.evals.run import build_request
from ar2diff.tokenizer import Message

# What lm-eval's own API models send with every request, so that sampled answers are equal too.
SEED = 1234
REQUESTS_AT_ONCE = 64
SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


class ChatText(str):
    """A rendered conversation that knows its messages, so that control tokens spelled in them stay plain text."""

    __slots__ = ("messages",)

    def __init__(self, text: str) -> None:
        del text
        self.messages: list[Message] = []


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the library carries no types
    """An engine that lm-eval asks.

    Likelihoods are exact, those of the causal path, whatever the mode. Plain text is encoded as it stands: control
    tokens that it spells stay text.

    Args:
        engine: of a parent or a converted model.
        mode: how `generate_until` decodes.
        max_tokens: of an answer whose task names no limit.
    """

    def __init__(self, engine: Engine, *, mode: EvalMode = AR_MODE, max_tokens: int = 256) -> None:
        super().__init__()
        self._engine, self._mode, self._max_tokens = engine, mode, max_tokens
        self._tokenizer = engine.loaded.tokenizer
        # lm-eval's API models leave a place for a token that they generate beside every score.
        self.max_length = engine.loaded.config.max_seq_len - 1

    @property
    @override
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_token_ids[0]

    @property
    @override
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored alone: its beginning token, else the end of turn."""
        begin = self._tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    @override
    def tokenizer_name(self) -> str:
        return f"ar2diff-{self._engine.loaded.tensor_root}"

    @override
    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.chat_template if chat_template else None

    @override
    def apply_chat_template(self, chat_history: list[Any], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it; a last turn by the assistant is gone on with.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        turns, start = split_start(chat_history)
        text = ChatText(self._tokenizer.render_chat(turns, add_generation_prompt=True) + start)
        text.messages = [*chat_history]
        return text

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if not isinstance(string, ChatText):
            return self._tokenizer.encode(string)
        turns, start = split_start(string.messages)
        return self._tokenizer.encode_chat(turns, add_generation_prompt=True) + self._tokenizer.encode(start)

    @override
    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if isinstance(context, ChatText):
            return self.tok_encode(context), self.tok_encode(continuation)
        found: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
        return found

    @override
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, stop texts left out.

        Raises:
            ConfigError: a generation setting that the engine does not know.
            RequestError: a prompt or setting that cannot be served.
        """
        asked = [self._build_generation(*request.args) for request in requests]
        return [generation.text for generation in self._run(asked)]

    @override
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log p of whole texts in nats, long ones in windows that overlap by one token."""
        return [self._score_text(*request.args) for request in requests]

    @override
    def _loglikelihood_tokens(self, requests: list[Encoded], **kwargs: Any) -> list[tuple[float, bool]]:
        cut = [self._cut_scored(context, continuation) for _, context, continuation in requests]
        asked = [Request(prompt_ids=tuple(ids), max_tokens=0, prompt_logprobs=1) for ids, _ in cut]
        asked = [request if self._is_converted else replace(request, mode="ar") for request in asked]
        pairs = zip(asked, self._run(asked), cut, strict=True)
        return [_sum_scores(request, generation, count) for request, generation, (_, count) in pairs]

    @property
    def _is_converted(self) -> bool:
        return self._engine.loaded.diffusion is not None

    def _build_generation(self, context: str, settings: dict[str, Any]) -> Request:
        given = normalize_gen_kwargs(settings, default_max_gen_toks=self._max_tokens)
        max_tokens = given.pop("max_gen_toks")
        room = self.max_length - max_tokens
        if room < 1:
            raise ConfigError(
                "the answer alone fills the context",
                given=f"{max_tokens} of {self.max_length} tokens",
                fix="Lower max_gen_toks",
            )
        ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        stop = tuple(dict.fromkeys(text for text in given.pop("until") if text))
        given.pop("do_sample")
        unknown = sorted(given.keys() - {*SAMPLING, "temperature"})
        if unknown:
            raise ConfigError("generation settings that the engine does not know", given=", ".join(unknown))
        request = build_request(self._mode, tuple(ids), max_tokens)
        return replace(request, stop=stop, seed=SEED, trace=False, **given)

    def _cut_scored(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], int]:
        """Context and continuation, cut from the left to what fits, and how many tokens of it are scored."""
        ids = [*context, *continuation][-self.max_length :]
        return ids, min(len(continuation), len(ids) - 1)

    def _score_text(self, text: str) -> float:
        windows = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length - 1,
            context_len=1,
        )
        pairs: list[Encoded] = [(None, *utils.make_disjoint_window(window)) for window in windows]
        return sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs))

    def _run(self, requests: Sequence[Request]) -> Iterator[Generation]:
        for first in range(0, len(requests), REQUESTS_AT_ONCE):
            for found in self._engine.generate_many(requests[first : first + REQUESTS_AT_ONCE]):
                if isinstance(found, Ar2diffError):
                    raise found
                yield found


def split_start(messages: Sequence[Any]) -> tuple[list[Message], str]:
    """The turns before the answer, and the start of the answer where the assistant has the last turn."""
    turns: list[Message] = [{"role": m["role"], "content": m["content"]} for m in messages]
    return (turns[:-1], turns[-1]["content"]) if turns[-1]["role"] == "assistant" else (turns, "")


def _sum_scores(request: Request, generation: Generation, count: int) -> tuple[float, bool]:
    """Log p of the last `count` tokens, and whether each of them is the likeliest in its place."""
    first = len(request.prompt_ids) - count
    logprobs = [value for value in generation.prompt_logprobs[first:] if value is not None]
    # As the served API reports it: a token as likely as the likeliest counts as greedy.
    bests = [top[0][1] for top in generation.prompt_top_logprobs[first:]]
    return sum(logprobs), all(own >= best for own, best in zip(logprobs, bests, strict=True))
