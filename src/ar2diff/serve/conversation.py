"""A chat request as the model's template takes it: turns, tools, thinking, and how the answer is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ar2diff.engine.constraint import Constraint
from ar2diff.errors import RequestError
from ar2diff.serve.fields import JsonSchemaFormat, TextFormat
from ar2diff.serve.problems import invalid
from ar2diff.serve.reading.dialect import SWITCH, Dialect
from ar2diff.serve.reading.reader import THINK, THINK_END, ReadingPlan
from ar2diff.serve.reading.values import Tools, read_json
from ar2diff.serve.schemas import ChatMessage, ChatRequest, MadeCall, NamedTool
from ar2diff.tokenizer import Message

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ONLY_FOR = {"reasoning_content": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation ready for the engine.

    Attributes:
        plan: how the answer is read; None where all of it is content.
        constraint: the form that the answer must have, or None.
    """

    prompt_ids: list[int]
    plan: ReadingPlan | None
    constraint: Constraint | None


def open_chat(asked: ChatRequest, dialect: Dialect) -> Chat:
    """The conversation and the start of an answer; a last turn by the assistant is that start.

    Raises:
        ApiError: status 400, naming the field: what contradicts itself, or what this model has no form for.
    """
    turns = _read_turns(asked.messages, dialect)
    tools = _read_tools(asked, dialect)
    start = turns.pop()["content"] if turns[-1]["role"] == "assistant" else ""
    shown = [tool.model_dump(exclude_unset=True) for tool in asked.tools or []] if tools else None
    variables = _read_variables(asked, dialect)
    try:
        tokenizer = dialect.tokenizer
        ids = tokenizer.encode_chat(turns, add_generation_prompt=True, tools=shown, variables=variables)
        opening = _read_opening(turns, shown, variables, dialect) + start
        is_open = opening.rfind(THINK) > opening.rfind(THINK_END)
        is_single = asked.parallel_tool_calls is False or isinstance(asked.tool_choice, NamedTool)
        plan = dialect.plan(tools, is_open=is_open, is_single=is_single)
        may_think = is_open or not opening.strip()
        constraint = _constrain(asked, tools, dialect, may_think=may_think, is_open=is_open, is_single=is_single)
    except RequestError as error:
        raise invalid(error.one_line(), param="messages") from None
    return Chat(prompt_ids=ids + tokenizer.encode(start), plan=plan, constraint=constraint)


def name_constraint(asked: Any) -> str:
    """The field that asks for a form."""
    is_call = isinstance(asked, ChatRequest) and asked.tool_choice not in (None, "none", "auto")
    return "tools" if is_call else "response_format"


def _read_opening(
    turns: list[Message], tools: list[dict[str, Any]] | None, variables: dict[str, Any], dialect: Dialect
) -> str:
    """What the template puts at the start of the answer, its header left out."""
    if not dialect.thinks:
        return ""
    options: dict[str, Any] = {"tools": tools, "variables": variables}
    before = dialect.tokenizer.render_chat(turns, add_generation_prompt=False, **options)
    after = dialect.tokenizer.render_chat(turns, add_generation_prompt=True, **options)
    added = after.removeprefix(before)
    return added[added.find(THINK) :] if THINK in added else ""


def _constrain(
    asked: ChatRequest, tools: Tools | None, dialect: Dialect, *, may_think: bool, is_open: bool, is_single: bool
) -> Constraint | None:
    form = asked.response_format
    schema: Mapping[str, Any] | None = None
    if form is not None and not isinstance(form, TextFormat):
        schema = form.json_schema.content if isinstance(form, JsonSchemaFormat) else {"type": "object"}
    is_forced = asked.tool_choice not in (None, "none", "auto")
    if schema is None and not is_forced:
        return None
    if isinstance(asked.tool_choice, NamedTool):
        name = asked.tool_choice.function.name
        tools = {name: (tools or {})[name]}
    param = name_constraint(asked)
    try:
        if schema is not None and not tools and not (may_think and dialect.thinks):
            return Constraint.json_schema(schema)
        schema = None if is_forced else schema
        return dialect.constrain(tools, schema, may_think=may_think, is_open=is_open, is_single=is_single)
    except (RequestError, TypeError, ValueError, RecursionError) as error:
        said = error.one_line() if isinstance(error, RequestError) else "the schema cannot be used"
        raise invalid(said, param=param) from None


def _read_variables(asked: ChatRequest, dialect: Dialect) -> dict[str, Any]:
    variables = asked.chat_template_kwargs
    if variables is None or variables.enable_thinking is None:
        return {}
    if not dialect.has_switch:
        message = f"this model's chat template has no {SWITCH}"
        raise invalid(message, param=f"chat_template_kwargs.{SWITCH}", code="unsupported_parameter")
    return {SWITCH: variables.enable_thinking}


def _read_tools(asked: ChatRequest, dialect: Dialect) -> Tools | None:
    """The tools that the model may call now; None for none."""
    if not asked.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(asked, name) not in (None, "none"):
                raise invalid(f"{name} needs tools", param=name)
        return None
    if dialect.format is None:
        message = "this model's chat template has no form for calls that this server reads"
        raise invalid(message, param="tools", code="unsupported_parameter")
    tools: dict[str, Mapping[str, Any]] = {}
    for idx, tool in enumerate(asked.tools):
        name, place = tool.function.name, f"tools[{idx}].function"
        if name in tools:
            raise invalid("two tools have the same name", param=f"{place}.name")
        tools[name] = _checked(tool.function.parameters, f"{place}.parameters")
    choice = asked.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in tools:
        raise invalid("there is no tool of that name", param="tool_choice")
    return None if choice == "none" else tools


def _checked(parameters: dict[str, Any] | None, place: str) -> dict[str, Any]:
    schema = _NO_PARAMETERS if parameters is None else parameters
    properties, required = schema.get("properties"), schema.get("required", [])
    is_named = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if schema.get("type", "object") != "object" or not isinstance(properties, dict | None) or not is_named:
        raise invalid("parameters is the JSON schema of an object", param=place)
    return schema


def _read_turns(messages: list[ChatMessage], dialect: Dialect) -> list[Message]:
    turns: list[Message] = []
    open_ids: set[str] = set()
    for idx, message in enumerate(messages):
        place = f"messages[{idx}]"
        _check_fields(message, place, is_last=idx == len(messages) - 1)
        if message.role == "tool":
            if message.tool_call_id not in open_ids:
                raise invalid("a tool message answers a call of the turn before it", param=f"{place}.tool_call_id")
        else:
            open_ids = {call.id for call in message.tool_calls or []}
        if (message.role == "tool" or message.tool_calls) and dialect.format is None:
            name = "tool_calls" if message.tool_calls else "role"
            raise invalid("this model's chat template has no form for calls", param=f"{place}.{name}")
        turns.append(_read_turn(message, place))
    return turns


def _check_fields(message: ChatMessage, place: str, *, is_last: bool) -> None:
    for name, role in _ONLY_FOR.items():
        if getattr(message, name) is not None and message.role != role:
            raise invalid(f"{name} is for the role {role}", param=f"{place}.{name}", code="unknown_parameter")
    if message.role == "tool" and message.tool_call_id is None:
        message_of = f"{place}.tool_call_id is missing"
        raise invalid(message_of, param=f"{place}.tool_call_id", code="missing_required_parameter")
    if message.content is None and not message.tool_calls:
        raise invalid(f"{place}.content is missing", param=f"{place}.content", code="missing_required_parameter")
    if is_last and (message.tool_calls or (message.role == "assistant" and message.reasoning_content)):
        name = "tool_calls" if message.tool_calls else "reasoning_content"
        raise invalid("a last turn by the assistant is continued: only text can be", param=f"{place}.{name}")


def _read_turn(message: ChatMessage, place: str) -> Message:
    turn: Message = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            _read_call(call, f"{place}.tool_calls[{idx}].function.arguments")
            for idx, call in enumerate(message.tool_calls)
        ]
    return turn


def _read_call(call: MadeCall, place: str) -> dict[str, Any]:
    try:
        arguments, end = read_json(call.function.arguments)
    except Exception:
        arguments, end = None, 0
    if not isinstance(arguments, dict) or call.function.arguments[end:].strip():
        raise invalid("arguments is the text of a JSON object", param=place)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
