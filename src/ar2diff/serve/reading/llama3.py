"""Calls as bare JSON, as Llama 3.1 to 3.3 write them."""

import re

from ar2diff.serve.reading.formats import write_json_calls
from ar2diff.serve.reading.values import Call, Tools, Unfinished, build_call, read_json
from ar2diff.tokenizer import Tokenizer

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)


class Llama3:
    """`{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`; semicolons part several."""

    sample: str = '{"name":"probe_call","parameters":{"probe_key":"probe_value"}}'
    begin: str = "<|python_tag|>"
    end: str | None = None
    inner: tuple[str, ...] = ()
    has_parallel = False

    def parse(self, block: str, tools: Tools) -> tuple[Call, str]:
        """As in `Format`."""
        body = block.removeprefix(self.begin)
        try:
            value, end = read_json(body)
        except ValueError:
            if _STRING.sub("", body).count("{") > _STRING.sub("", body).count("}"):
                raise Unfinished from None
            raise
        if not isinstance(value, dict) or value.keys() != {"name", "parameters"}:
            raise ValueError("not a call")
        return build_call(value["name"], value["parameters"], tools), body[end:]

    def write_grammar(self, tools: Tools, tokenizer: Tokenizer) -> str:
        """As in `Format`."""
        del tokenizer
        return f"call: body\n{write_json_calls(tools, 'parameters')}"
