"""From a request's body to engine requests: prompts as token ids, one engine request a choice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ar2diff.engine.request import Request, check_request
from ar2diff.errors import ContextOverflowError, RequestError
from ar2diff.seeding import derive_seed
from ar2diff.serve.conversation import open_chat
from ar2diff.serve.fields import DiffusionOptions, GenerationFields
from ar2diff.serve.problems import ApiError, invalid
from ar2diff.serve.schemas import ChatRequest, CompletionRequest
from ar2diff.serve.served import ServedModel


def build_requests(
    asked: ChatRequest | CompletionRequest, served: ServedModel, *, draw_seed: Callable[[], int], max_choices: int
) -> list[Request]:
    """One engine request a choice: prompts in order, `n` of each. Answers differ by their seeds only.

    Raises:
        ApiError: status 400: what this model cannot do, an empty or too long prompt.
    """
    settings = _settings(asked, served)
    if isinstance(asked, ChatRequest):
        chat = open_chat(asked, served.dialect)
        prompt_name, prompts = "messages", [chat.prompt_ids]
        settings |= {"reader": chat.plan, "constraint": chat.constraint}
    else:
        prompt_name, prompts = "prompt", _plain_ids(asked, served)
    count = asked.n or 1
    if len(prompts) * count > max_choices:
        raise invalid(f"at most {max_choices} choices a request", param="n")
    seed = asked.seed if asked.seed is not None else draw_seed()
    built: list[Request] = []
    for prompt_ids in prompts:
        first = _checked(prompt_ids, settings, served, prompt_name)
        built += [replace(first, seed=choice_seed(seed, idx)) for idx in range(count)]
    return built


def choice_seed(seed: int, idx: int) -> int:
    """The seed of a prompt's choice `idx`; the first has the request's own, so it is the answer of `n` = 1."""
    return seed if idx == 0 else derive_seed("choice", seed, idx)


def _plain_ids(asked: CompletionRequest, served: ServedModel) -> list[list[int]]:
    encode = served.loaded.tokenizer.encode
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]


def _settings(asked: ChatRequest | CompletionRequest, served: ServedModel) -> dict[str, Any]:
    options = asked.diffusion or DiffusionOptions()
    parameter, max_tokens = options.policy_parameter, _max_tokens(asked)
    return {
        **_scoring(asked),
        "max_tokens": served.loaded.config.max_seq_len if max_tokens is None else max_tokens,
        "mode": options.mode or served.default_mode,
        "block_size": options.block_size,
        "denoising_steps": options.denoising_steps,
        "policy": options.policy or "threshold",
        "policy_parameter": None if parameter is None else float(parameter),
        "temperature": float(1 if asked.temperature is None else asked.temperature),
        "top_p": float(1 if asked.top_p is None else asked.top_p),
        "top_k": asked.top_k,
        "min_p": float(asked.min_p or 0),
        "presence_penalty": float(asked.presence_penalty or 0),
        "frequency_penalty": float(asked.frequency_penalty or 0),
        "repetition_penalty": float(1 if asked.repetition_penalty is None else asked.repetition_penalty),
        "stop": asked.stops,
        "logit_bias": {int(idx): float(value) for idx, value in (asked.logit_bias or {}).items()},
        # Never "auto": equal requests have equal answers, what they cost included.
        "draft_len": options.draft_len,
        "adaptive_draft": True,
        "copy_drafts": options.copy_drafts is not False,
        "trace": options.trace,
    }


def _max_tokens(asked: GenerationFields) -> int | None:
    if isinstance(asked, ChatRequest):
        return asked.max_completion_tokens or asked.max_tokens
    return 16 if asked.max_tokens is None else asked.max_tokens  # the public API's own default for this route


def _scoring(asked: ChatRequest | CompletionRequest) -> dict[str, int | None]:
    """Which log probabilities the engine reports; a prompt without an answer can only be scored."""
    if isinstance(asked, ChatRequest):
        return {"top_logprobs": asked.top_logprobs or 0}
    is_scored = asked.echo and (asked.logprobs is not None or asked.max_tokens == 0)
    return {"top_logprobs": asked.logprobs or 0, "prompt_logprobs": (asked.logprobs or 0) if is_scored else None}


def _checked(prompt_ids: list[int], settings: dict[str, Any], served: ServedModel, prompt_name: str) -> Request:
    config, diffusion = served.loaded.config, served.loaded.diffusion
    if not prompt_ids:
        raise invalid("the prompt is empty", param=prompt_name)
    try:
        request = Request(prompt_ids=tuple(prompt_ids), **settings)
        check_request(request, config, diffusion)
    except ContextOverflowError as error:
        raise invalid(error.one_line(), param=prompt_name, code="context_length_exceeded") from None
    except RequestError as error:
        raise _named_fault(error, prompt_ids, settings, served, prompt_name) from None
    return request


def _named_fault(
    error: RequestError, prompt_ids: list[int], settings: dict[str, Any], served: ServedModel, prompt_name: str
) -> ApiError:
    """The fault with the field that causes it: the one without which the request is fine."""
    vocab_size = served.loaded.config.vocab_size
    defaults = {"policy_parameter": None, "policy": "threshold", "block_size": None, "denoising_steps": None}
    params = {name: f"diffusion.{name}" for name in (*defaults, "mode")}
    for name, default in defaults.items():
        if settings[name] != default and _is_fine({**settings, name: default}, prompt_ids, served):
            return invalid(error.one_line(), param=params[name])
    if any(idx >= vocab_size for idx in settings["logit_bias"]):
        return invalid(error.one_line(), param="logit_bias")
    if any(not 0 <= idx < vocab_size for idx in prompt_ids):
        return invalid(error.one_line(), param=prompt_name)
    unscored = {"prompt_logprobs": None, "max_tokens": max(1, settings["max_tokens"])}
    if settings.get("prompt_logprobs") is not None and _is_fine({**settings, **unscored}, prompt_ids, served):
        return invalid(error.one_line(), param="echo")
    other_policy = {"policy": "threshold", "policy_parameter": None}
    if _is_fine({**settings, **other_policy}, prompt_ids, served):
        return invalid(error.one_line(), param=params["policy"])
    return invalid(error.one_line(), param=params["mode"])


def _is_fine(settings: dict[str, Any], prompt_ids: list[int], served: ServedModel) -> bool:
    try:
        check_request(
            Request(prompt_ids=tuple(prompt_ids), **settings), served.loaded.config, served.loaded.diffusion
        )
    except RequestError:
        return False
    return True
