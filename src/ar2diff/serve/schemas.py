"""Request bodies of `/v1/chat/completions` and `/v1/completions`, and how one is read. Free of torch.

Every field is honoured or refused with a 400 that names it.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic_core import ErrorDetails

from ar2diff.serve.fields import Count, GenerationFields, ResponseFormat, StrictModel, TopCount
from ar2diff.serve.problems import ApiError, invalid

MAX_MESSAGES = 1024
MAX_PROMPTS = 32
MAX_TOOLS = 128
FunctionName = Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
TokenIds = Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]

Fields = TypeVar("Fields", bound=GenerationFields)


class TextPart(StrictModel):
    """A piece of a message; images and files are refused and never fetched."""

    type: Literal["text"]
    text: StrictStr


Content = StrictStr | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class CalledFunction(StrictModel):
    """What an assistant called; the arguments are the text of a JSON object."""

    name: StrictStr
    arguments: StrictStr


class MadeCall(StrictModel):
    """A call that an assistant made."""

    id: StrictStr
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    """One turn; a last one by the assistant is continued. Some fields are for some roles only.

    What a developer says is a system turn to the model's template.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: StrictStr | None = None
    tool_calls: Annotated[list[MadeCall], Field(min_length=1, fail_fast=True)] | None = None
    tool_call_id: StrictStr | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionTool(StrictModel):
    """A function that may be called; without parameters it takes none."""

    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(StrictModel):
    """What may be called."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(StrictModel):
    """The name of a function."""

    name: FunctionName


class NamedTool(StrictModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TemplateVariables(StrictModel):
    """What of the chat template's own a request may set."""

    enable_thinking: StrictBool | None = None


class ChatRequest(GenerationFields):
    """The body of `/v1/chat/completions`."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.NEUTRAL,
        "functions": (None, []),
        "function_call": (None, "none"),
        "reasoning_effort": (None,),
        "modalities": (None, ["text"]),
        "store": (None, False),
        "metadata": (None, {}),
        "service_tier": (None, "auto", "default"),
        "audio": (None,),
        "prediction": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: TopCount | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`: plain text or token ids, no chat template.

    With `echo` the answer begins with the prompt, and `logprobs` reports the prompt's tokens too; only then may
    `max_tokens` be 0.
    """

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.NEUTRAL,
        "suffix": (None, ""),
        "best_of": (None, 1),
    }

    prompt: (
        Annotated[StrictStr, Field(min_length=1)]
        | TokenIds
        | Annotated[
            Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(fail_fast=True)]
            | Annotated[list[TokenIds], Field(fail_fast=True)],
            Field(min_length=1),
        ]
    )
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    echo: StrictBool | None = None
    logprobs: TopCount | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one a choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[idx for idx in self.prompt if isinstance(idx, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


def read_request(kind: type[Fields], value: Any) -> Fields:
    """The request that a body holds.

    Raises:
        ApiError: status 400, naming the field.
    """
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    for name in kind.NEUTRAL.keys() & value.keys():
        if not _is_neutral(value[name], kind.NEUTRAL[name]):
            raise invalid(f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    unknown = next((name for name in value if name not in kind.model_fields and name not in kind.NEUTRAL), None)
    if unknown is not None:
        raise _unknown_field(unknown[:200])
    messages = value.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise invalid(f"messages holds more than {MAX_MESSAGES} messages", param="messages")
    prompts = value.get("prompt")
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS and isinstance(prompts[0], str | list):
        # Else a fault within the first, read as a list of ids, would be told: it is deeper.
        raise invalid(f"prompt holds more than {MAX_PROMPTS} prompts", param="prompt")
    try:
        request = kind.model_validate({k: v for k, v in value.items() if k not in kind.NEUTRAL})
    except ValidationError as error:
        raise _first_fault(error, value) from None
    _check_together(request)
    return request


def _is_neutral(given: Any, neutral: tuple[Any, ...]) -> bool:
    # 0 == False in Python, but not in JSON.
    return any(given == value and type(given) is type(value) for value in neutral)


def _check_together(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream", param="stream_options")
    if isinstance(request, ChatRequest):
        both = (request.max_tokens, request.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs needs logprobs", param="top_logprobs")
    if isinstance(request, CompletionRequest):
        if request.max_tokens == 0 and not request.echo:
            raise invalid("max_tokens of 0 needs echo", param="max_tokens")
        if request.echo and request.stream:
            raise invalid("echo is not supported with stream", param="echo")


def _first_fault(error: ValidationError, value: dict[str, Any]) -> ApiError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    # Where a field may be one thing or another, the branch that went deepest is the one that was meant.
    same_field = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    fault = max(same_field, key=lambda fault: len(_describe_place(fault, value)))
    param = _describe_place(fault, value)[:200] or None
    if fault["type"] == "extra_forbidden":
        return _unknown_field(param)
    if fault["type"] == "missing":
        return invalid(f"{param} is missing", param=param, code="missing_required_parameter")
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return invalid(f"{param}: {message}", param=param)


def _unknown_field(name: str | None) -> ApiError:
    return invalid(f"unknown field {name}", param=name, code="unknown_parameter")


def _describe_place(fault: ErrorDetails, value: Any) -> str:
    """The dotted path of a fault, without the names of union branches that pydantic mixes in."""
    path = ""
    for place in fault["loc"]:
        if isinstance(place, int) and isinstance(value, list) and place < len(value):
            path, value = f"{path}[{place}]", value[place]
        elif isinstance(place, str) and isinstance(value, dict) and place in value:
            path, value = f"{path}.{place}", value[place]
    if fault["type"] == "missing":
        path = f"{path}.{fault['loc'][-1]}"
    return path.removeprefix(".")
