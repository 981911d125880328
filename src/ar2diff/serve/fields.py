"""The parts of a request body that the chat and the completion route share. Free of torch.

Types are strict, unknown fields are refused, and what this server does not implement is accepted only at the value
that changes nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ar2diff.engine.request import MAX_STOPS, MAX_TOP_LOGPROBS

MAX_STOP_LEN = 256
MAX_BIASED = 300
MAX_DENOISING_STEPS = 4096
MAX_FIELDS = 64

# A float field takes 1 as well as 1.0, but never true or "1".
Number = Annotated[StrictFloat | StrictInt, Field(union_mode="left_to_right")]
StopText = Annotated[StrictStr, Field(min_length=1, max_length=MAX_STOP_LEN)]
Count = Annotated[StrictInt, Field(ge=1)]
TopCount = Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class StrictModel(BaseModel):
    """An object whose every field is known.

    Wrong fields and items are not collected without end: an error each of a million costs more than the request.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_many_fields(cls, value: Any) -> Any:
        return _refuse_beyond(value, MAX_FIELDS)


def _refuse_beyond(value: Any, max_entries: int) -> Any:
    if isinstance(value, dict) and len(value) > max_entries:
        raise PydanticCustomError("too_many_entries", f"an object of more than {max_entries} entries")
    return value


class DiffusionOptions(StrictModel):
    """How to decode: this server's extension.

    `policy_parameter` is the policy's one number, such as the confidence threshold. In verified mode the model drafts
    `draft_len` tokens a cycle at most, and `copy_drafts` (true unless given) drafts what followed the same tokens
    before. With `trace` the answer carries every pass.
    """

    mode: Literal["diffusion", "verified", "ar"] | None = None
    denoising_steps: Annotated[StrictInt, Field(ge=1, le=MAX_DENOISING_STEPS)] | None = None
    policy: StrictStr | None = None
    policy_parameter: Number | None = None
    block_size: Count | None = None
    draft_len: Count | None = None
    copy_drafts: StrictBool | None = None
    trace: StrictBool = False


class StreamOptions(StrictModel):
    """What a stream carries besides text."""

    include_usage: StrictBool | None = None


class TextFormat(StrictModel):
    """Text of any form."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema; the answer is held to it whatever `strict` says."""

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: StrictStr | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationFields(StrictModel):
    """Fields of both generating routes; null means the default.

    `NEUTRAL` lists fields that this server does not implement, with the values that ask for nothing.
    """

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: StrictStr
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=8)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[StrictStr, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
                Annotated[Number, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASED),
            BeforeValidator(lambda value: _refuse_beyond(value, MAX_BIASED)),
        ]
        | None
    ) = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[StrictStr, Field(max_length=512)] | None = None
    diffusion: DiffusionOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)
