"""Calls as JSON between tags, after the Hermes models of Nous Research; Qwen 2.5 and 3 write them too."""

from ar2diff.serve.reading.formats import write_json_calls, write_terminal
from ar2diff.serve.reading.values import Call, Tools, build_call, read_json
from ar2diff.tokenizer import Tokenizer


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    sample: str = '<tool_call>{"name":"probe_call","arguments":{"probe_key":"probe_value"}}</tool_call>'
    begin: str = "<tool_call>"
    end: str | None = "</tool_call>"
    inner: tuple[str, ...] = ()
    has_parallel = True

    def parse(self, block: str, tools: Tools) -> tuple[Call, str]:
        """As in `Format`."""
        body = block.removeprefix(self.begin).removesuffix("</tool_call>")
        value, end = read_json(body)
        if body[end:].strip() or not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
            raise ValueError("not a call")
        return build_call(value["name"], value["arguments"], tools), ""

    def write_grammar(self, tools: Tools, tokenizer: Tokenizer) -> str:
        """As in `Format`."""
        begin, end = (write_terminal(text, tokenizer) for text in (self.begin, "</tool_call>"))
        return f'call: {begin} "\\n" body "\\n" {end}\n{write_json_calls(tools, "arguments")}'
