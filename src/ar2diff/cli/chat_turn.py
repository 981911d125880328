"""One turn of a chat as the server reads it: thinking apart, calls found, tools and the thinking switch obeyed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ar2diff.errors import RequestError

if TYPE_CHECKING:
    from ar2diff.serve.conversation import Chat
    from ar2diff.serve.reading.dialect import Dialect
    from ar2diff.serve.reading.values import Call


def open_turn(
    dialect: "Dialect", messages: Sequence[dict[str, Any]], tools: Sequence[Any], *, thinking: bool | None
) -> "Chat":
    """The prompt of the next answer, and how that answer is read.

    Args:
        messages: the conversation, as the API takes it.
        thinking: whether the model thinks; None leaves it to its template.

    Raises:
        RequestError: what the server would refuse: tools of another form, or ones that the model has no form for.
    """
    from ar2diff.serve.conversation import open_chat
    from ar2diff.serve.problems import ApiError
    from ar2diff.serve.schemas import ChatRequest, read_request

    body: dict[str, Any] = {"model": "chat", "messages": list(messages), "tools": list(tools)}
    if thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinking}
    try:
        return open_chat(read_request(ChatRequest, body), dialect)
    except ApiError as error:
        raise RequestError(str(error)) from None


def read_tools(path: Path) -> list[Any]:
    """The tools in a file: a JSON array, as the API takes it.

    Raises:
        RequestError: it cannot be read, or holds something else.
    """
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"the tools cannot be read: {type(error).__name__}", given=str(path)) from None
    if not isinstance(tools, list):
        raise RequestError("tools are a JSON array", given=str(path))
    return tools


def build_message(content: str, reasoning: str, calls: "Sequence[Call]", *, num_before: int) -> dict[str, Any]:
    """An assistant's turn for the history; `num_before` messages keep the ids of its calls apart from others."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call-{num_before}-{idx}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for idx, call in enumerate(calls)
        ]
    return message
