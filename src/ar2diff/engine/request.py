"""What a caller asks of the engine: one prompt and how to answer it. Free of torch.

`Request` checks what it can know alone; `check_request` checks it against a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ar2diff.diffusion.unmask import Policy, build_policy
from ar2diff.engine.constraint import Constraint
from ar2diff.engine.text import AnswerReader
from ar2diff.errors import ConfigError, ContextOverflowError, RequestError
from ar2diff.models.config import DecoderConfig, DiffusionConfig

Mode = Literal["diffusion", "verified", "ar"]
MODES: tuple[str, ...] = get_args(Mode)
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100
# Inclusive limits of the fields that are plain numbers; a name in `_POSITIVE` must also be above 0.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
}
_POSITIVE = ("top_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request.

    The logits of a pass become a distribution in this order: `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`, `logit_bias`, ids that are never emitted, `constraint`; log probabilities and the confidence
    of unmasking are read off here. Then `temperature`, `top_k`, `top_p`, `min_p`; the token is drawn from the rest.
    What penalties count as generated are the answer's tokens that the pass sees: in mode "ar" and in verification
    those before the position, in a denoising pass all that are revealed, wherever they stand.

    Attributes:
        prompt_ids: the prompt's token ids, at least one.
        max_tokens: the answer's length at most, the end-of-turn token counted; never rounded to blocks. 0 only with
            `prompt_logprobs`: then the prompt is scored and nothing is generated.
        mode: "diffusion" denoises blocks; "verified" drafts by diffusion and keeps what the model's own AR path
            agrees with; "ar" decodes one token at a time.
        block_size: one of the trained sizes; None is the checkpoint's own.
        denoising_steps: passes a block at most; None allows one a token, or in verified mode a single draft pass.
        policy, policy_parameter: the unmasking policy and its one number (None: the policy's default).
        temperature: 0 is greedy.
        top_p, top_k, min_p: limits of sampling: the nucleus, the rank (None: no limit), and the share of the
            likeliest token's probability that a token must have.
        presence_penalty, frequency_penalty: taken off the logit of an id that was generated: once, and once for each
            time (the definition of the OpenAI API).
        repetition_penalty: the logit of an id that is in the prompt or was generated is divided by it where positive
            and multiplied where negative (Keskar et al., 2019); 1 changes nothing.
        seed: the answer's randomness, together with position and pass.
        stop: texts that end the answer; the first one to be complete wins.
        include_stop: keep the stop text in the answer.
        logit_bias: added to the logits of some ids; -100 to 100.
        top_logprobs: likeliest tokens to report beside each token; 0 to 20.
        prompt_logprobs: report log p of each prompt token given those before it, by the AR path, and this many
            likeliest tokens; None reports nothing. Bias, penalties and constraint do not count here. Needs a model
            that has an AR path.
        constraint: the form the answer has. It ends as soon as the form allows no more; an end of turn comes only
            where the form is complete. `max_tokens` leaves a beginning of the form, which need not parse, and the
            finish reason "length"; a stop text cuts it like any text. A block may take more passes
            than `denoising_steps`: tokens that break the form return to MASK.
        reader: makes what reads the answer's text off its tokens; None takes all text. A reader may keep a part, such
            as thinking: stop texts count in the rest only.
        fused_commit: commit a block and make the next one's first pass in one forward. A shifted model sees the
            next block's anchor masked in that pass, so it must be trained with a positive `anchor_mask_rate`. Where
            blocks begin with the last token (`DiffusionConfig.anchor`) it is always so, and nothing is masked.
        draft_len: verified mode: tokens drafted a cycle at most; None is block_size - 1. "auto" drafts as much as
            promises the most tokens a second, and nothing where a step of the AR path is the better buy; the
            engine measures what passes cost. The greedy answer is the same. Sampled answers depend on the draft, so
            above temperature 0 it is block_size - 1, as it is with `draft_lanes` or `adaptive_draft`.
        adaptive_draft: verified mode: draft less while little is accepted. The greedy answer is the same; a sampled
            one has the same distribution.
        draft_lanes: verified mode: acceptance lengths whose next draft rides along with verification; 0 drafts in
            a pass of its own. Answers are as with `adaptive_draft`.
        copy_drafts: verified mode: draft what followed the last tokens where they stood before in prompt or answer,
            if that promises more than a draft by the model: it costs no pass. Answers are as with `adaptive_draft`.
        trace: keep every pass in the result.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    mode: Mode = "diffusion"
    block_size: int | None = None
    denoising_steps: int | None = None
    policy: str = "threshold"
    policy_parameter: float | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    reader: Callable[[], AnswerReader] | None = None
    fused_commit: bool = False
    draft_len: int | Literal["auto"] | None = None
    adaptive_draft: bool = False
    draft_lanes: int = 0
    copy_drafts: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        _check(len(self.prompt_ids) > 0, "the prompt is empty", None)
        least = 1 if self.prompt_logprobs is None else 0
        _check(self.max_tokens >= least, f"max_tokens must be at least {least}", self.max_tokens)
        _check(self.mode in MODES, f"mode is one of {', '.join(MODES)}", self.mode)
        for name in ("block_size", "denoising_steps", "top_k", "draft_len"):
            value = getattr(self, name)
            is_auto = name == "draft_len" and value == "auto"
            _check(value is None or is_auto or value >= 1, f"{name} must be at least 1", value)
        for name, (low, high) in _RANGES.items():
            value, is_open = getattr(self, name), name in _POSITIVE
            _check(
                low <= value <= high and not (is_open and value == low),
                f"{name} must lie in {'(' if is_open else '['}{low:g}, {high:g}]",
                value,
            )
        for name in ("top_logprobs", "prompt_logprobs"):
            in_range = 0 <= (getattr(self, name) or 0) <= MAX_TOP_LOGPROBS
            _check(in_range, f"{name} must lie in [0, {MAX_TOP_LOGPROBS}]", getattr(self, name))
        _check(-(2**63) <= self.seed < 2**64, "seed must fit in 64 bits", self.seed)
        _check(len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} stop texts", len(self.stop))
        _check(all(self.stop), "a stop text is empty", None)
        far = next((value for value in self.logit_bias.values() if not abs(value) <= MAX_LOGIT_BIAS), None)
        _check(far is None, f"logit_bias must lie in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]", far)
        _check(self.draft_lanes >= 0, "draft_lanes must not be negative", self.draft_lanes)
        self.build_policy()

    @property
    def chooses_draft_len(self) -> bool:
        """Whether the lengths of drafts go by what passes cost: only where that cannot change the answer."""
        is_plain = self.draft_lanes == 0 and not self.adaptive_draft
        return self.mode == "verified" and self.draft_len == "auto" and is_plain and self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether generated tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    def build_policy(self) -> Policy:
        """The unmasking policy asked for.

        Raises:
            RequestError: no such policy, or its parameter is out of range.
        """
        try:
            return build_policy(self.policy, self.policy_parameter)
        except ConfigError as error:
            raise RequestError(error.problem, given=error.given, fix=error.fix) from None


def check_request(request: Request, config: DecoderConfig, diffusion: DiffusionConfig | None) -> None:
    """Refuse a request that this model cannot serve, before any work.

    Raises:
        RequestError: an id beyond the vocabulary, a mode or block size that the model was not trained for.
        ContextOverflowError: the prompt leaves no room for a single token.
    """
    ids = (*request.prompt_ids, *request.logit_bias)
    bad = next((idx for idx in ids if not 0 <= idx < config.vocab_size), None)
    _check(bad is None, f"token ids run from 0 to {config.vocab_size - 1}", bad)
    if len(request.prompt_ids) + min(1, request.max_tokens) > config.max_seq_len:
        raise ContextOverflowError(
            f"the prompt leaves no room in a context of {config.max_seq_len} tokens",
            given=f"{len(request.prompt_ids)} prompt tokens",
            fix="Shorten the prompt",
        )
    if diffusion is None:
        fix = "Convert the model first, or ask for mode ar"
        _check(request.mode == "ar", "this model is not converted to diffusion", request.mode, fix)
        return
    if request.mode != "diffusion" or request.prompt_logprobs is not None:
        is_causal = diffusion.shift_logits and diffusion.clean_attention == "causal"
        what = "prompt_logprobs" if request.mode == "diffusion" else f"mode {request.mode}"
        fix = "Ask for mode diffusion, without prompt_logprobs"
        _check(is_causal, f"{what} needs shifted logits and causal clean attention", None, fix)
    sizes = diffusion.trained_block_sizes
    fix = f"Choose one of {', '.join(map(str, sizes))}"
    _check(
        request.block_size in (None, *sizes), "the model is not trained for this block_size", request.block_size, fix
    )


def _check(holds: bool, problem: str, given: Any, fix: str | None = None) -> None:
    if not holds:
        raise RequestError(problem, given=given, fix=fix)
