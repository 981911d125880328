"""Text to token ids and back, with the model's own chat template; user text never becomes a control token.

Reads and writes the Hugging Face files: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ar2diff.errors import ModelError, RequestError
from ar2diff.files import read_json, write_json, write_text

# Private-use code points stand in for message texts while the template is rendered.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
# Turn-end tokens of the supported families, in order of preference, where the config names no better one.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<|endoftext|>")


class Message(TypedDict):
    """One turn: `role` is system, user or assistant."""

    role: str
    content: str


class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
        vocab_size: number of ids the tokenizer knows, added tokens included.
        eos_token_ids: ids that end a turn; the first is what training appends and fills with.
        special_ids: ids of control tokens.
        chat_template: the jinja text, or None for a base model.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        chat_template: str | None,
        config: dict[str, Any] | None = None,
    ) -> None:
        if not eos_token_ids:
            raise ModelError("the tokenizer names no end token", fix="Set eos_token in tokenizer_config.json")
        self._backend = backend
        self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        self._config = dict(config or {})
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(idx for idx, token in added.items() if token.special)
        self._special_texts = [added[idx].content for idx in sorted(self.special_ids)]

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Load from a model folder.

        Raises:
            ModelError: `tokenizer.json` is missing or unreadable, or no end token is named.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError("no tokenizer.json in the model folder", given=str(folder), fix="Fetch the model again")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"tokenizer.json cannot be read: {error}", given=str(path)) from None
        config = _optional_json(folder / "tokenizer_config.json")
        generation = _optional_json(folder / "generation_config.json")
        return cls(
            backend,
            eos_token_ids=_find_turn_ends(backend, config, generation),
            chat_template=_find_template(folder, config),
            config=config,
        )

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """The stored text of an id, or None."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of `text`, nothing added; control tokens in it stay plain text unless `parse_special`."""
        backend = self._backend if parse_special else self._plain
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; an incomplete UTF-8 sequence shows as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as the model's template writes it.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template", fix="Use plain text prompts")
        try:
            return _compile_template(self.chat_template).render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._special_text("bos_token"),
                eos_token=self._special_text("eos_token"),
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from None

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Ids of the rendered conversation; only the template's own control tokens count as such."""
        texts = [m["content"] for m in messages]
        if not any(special in text for text in texts for special in self._special_texts):
            rendered = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
            return self.encode(rendered, parse_special=True)
        return self._encode_chat_in_pieces(messages, add_generation_prompt)

    def _encode_chat_in_pieces(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        # A text that spells a control token is kept apart from the template's text, which alone is parsed.
        marked: list[Message] = [
            {"role": m["role"], "content": f"{_OPEN}{idx}{_CLOSE}"} for idx, m in enumerate(messages)
        ]
        rendered = self.render_chat(marked, add_generation_prompt=add_generation_prompt)
        ids: list[int] = []
        for part in rendered.split(_OPEN):
            number, found, rest = part.partition(_CLOSE)
            if found:
                ids += self.encode(messages[int(number)]["content"])
            ids += self.encode(rest if found else number, parse_special=True)
        return ids

    def save(self, folder: Path) -> None:
        """Write the three files into `folder`, each whole."""
        write_text(folder / "tokenizer.json", self._backend.to_str(pretty=True))
        end = self.id_to_token(self.eos_token_ids[0])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, "eos_token": end}
        config["eos_token_ids"] = list(self.eos_token_ids)
        config.pop("chat_template", None)
        write_json(folder / "tokenizer_config.json", config)
        if self.chat_template is not None:
            write_text(folder / "chat_template.jinja", self.chat_template)

    def _special_text(self, name: str) -> str:
        return _token_text(self._config.get(name)) or ""


@lru_cache(maxsize=16)
def _compile_template(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_template_error
    return environment.from_string(text)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path, error=ModelError) if path.is_file() else {}


def _token_text(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    return template if isinstance(template, str) else None


def _find_turn_ends(backend: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    stored = config.get("eos_token_ids")
    if isinstance(stored, list) and stored:
        return [int(idx) for idx in stored]
    names = [*_TURN_ENDS[:4], _token_text(config.get("eos_token")), *_TURN_ENDS[4:]]
    named = [backend.token_to_id(name) for name in names if name]
    ids = [idx for idx in named if idx is not None][:1]
    declared = generation.get("eos_token_id", [])
    return ids + [int(idx) for idx in (declared if isinstance(declared, list) else [declared])]
