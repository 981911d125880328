"""Text to token ids and back, with the model's own chat template; user text never becomes a control token.

Reads and writes the Hugging Face files: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ar2diff.errors import ModelError, RequestError
from ar2diff.files import read_json, write_json, write_text

# Private-use code points stand in for control tokens that a message spells, while the template is rendered.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
# Turn-end tokens of the supported families, in order of preference, where the config names no better one.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<|endoftext|>")


def _byte_letters() -> dict[str, int]:
    """The printable letter that byte-level vocabularies write for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + idx): byte for idx, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


class Message(TypedDict):
    """One turn: `role` is system, user, assistant or tool; an assistant's may hold thinking and calls.

    A call is `{"id", "type": "function", "function": {"name", "arguments"}}`, the arguments as an object.
    """

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
        vocab_size: number of ids the tokenizer knows, added tokens included.
        max_token_id: the largest of these ids; `vocab_size - 1` where ids have no gaps.
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
        known = set(backend.get_vocab(with_added_tokens=True).values())
        self.max_token_id: int = max(known)
        self._gap_ids = sorted(set(range(self.max_token_id)) - known)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(idx for idx, token in added.items() if token.special)
        self._added = {idx: token.content for idx, token in added.items()}
        texts = sorted(added[idx].content for idx in self.special_ids)
        self._spelled = re.compile("|".join(map(re.escape, [*texts, _OPEN, _CLOSE])))

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

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text, as the model's files name it, or None."""
        text = _token_text(self._config.get("bos_token"))
        return None if text is None else self.token_to_id(text)

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token that the model's files name, or None."""
        text = _token_text(self._config.get("pad_token"))
        return None if text is None else self.token_to_id(text)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """The stored text of an id, or None."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def list_unknown(self, vocab_size: int) -> list[int]:
        """The ids below `vocab_size` that stand for no token, sorted: those in gaps, and those beyond the last."""
        gaps = [idx for idx in self._gap_ids if idx < vocab_size]
        return [*gaps, *range(self.max_token_id + 1, vocab_size)]

    def token_bytes(self, token_id: int) -> bytes:
        """What an id stands for within a text, as UTF-8; perhaps a part of a character only.

        A control token gives its own text, an id that the tokenizer does not know nothing.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.id_to_token(token_id) or ""
        if "ByteLevel" in self._decoders:
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        if "ByteFallback" in self._decoders and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of `text`, nothing added; control tokens in it stay plain text unless `parse_special`."""
        backend = self._backend if parse_special else self._plain
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # a lone surrogate, such as JSON can spell
            raise RequestError("the text is not valid Unicode", given=ascii(text[:80])) from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; an incomplete UTF-8 sequence shows as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's template writes it.

        Args:
            tools: what the model may call, as `{"type": "function", "function": {...}}`.
            variables: more of what the template reads, such as `enable_thinking`.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        try:
            rendered: str = self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._special_text("bos_token"),
                eos_token=self._special_text("eos_token"),
                tools=list(tools) if tools else None,
                **(variables or {}),
            )
        except RequestError:
            raise
        except Exception as error:  # a template is somebody's program: it may fail in any way
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        return rendered

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the rendered conversation; only the template's own control tokens count as such."""
        pieces = self._cut_chat(messages, add_generation_prompt, tools, variables)
        return [idx for text, parse_special in pieces for idx in self.encode(text, parse_special=parse_special)]

    def encode_many(self, texts: Sequence[str], *, parse_special: bool = False) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        backend = self._backend if parse_special else self._plain
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_chats(
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool
    ) -> list[list[int]]:
        """`encode_chat` of each conversation, on all cores."""
        cuts = [self._cut_chat(messages, add_generation_prompt) for messages in conversations]
        encoded = {
            kind: iter(
                self.encode_many([text for cut in cuts for text, own in cut if own is kind], parse_special=kind)
            )
            for kind in (True, False)
        }
        return [[idx for _, own in cut for idx in next(encoded[own])] for cut in cuts]

    def _cut_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[tuple[str, bool]]:
        """The rendered conversation in pieces: True for the template's own text, False for a spelled token."""
        spelled: list[str] = []

        def hide(found: re.Match[str]) -> str:
            spelled.append(found.group())
            # Templates write text with a "<" in another way.
            return f"{_OPEN}{'<' if '<' in found.group() else ''}{len(spelled) - 1}{_CLOSE}"

        def hide_text(text: str) -> str:
            return self._spelled.sub(hide, text)

        rendered = self.render_chat(
            _map_texts([*messages], hide_text),
            add_generation_prompt=add_generation_prompt,
            tools=_map_texts(tools, hide_text),
            variables=variables,
        )
        first, *others = rendered.split(_OPEN)
        pieces = [(first, True)]
        for other in others:
            number, _, text = other.removeprefix("<").partition(_CLOSE)
            if not (number.isdecimal() and int(number) < len(spelled)):
                raise RequestError("the chat template cuts a message inside a control token's text")
            pieces += [(spelled[int(number)], False), (text, True)]
        return pieces

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        text: str = self._backend.to_str(pretty=True)
        return text

    def save(self, folder: Path) -> None:
        """Write the three files into `folder`, each whole."""
        write_text(folder / "tokenizer.json", self.to_json())
        end = self.id_to_token(self.eos_token_ids[0])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, "eos_token": end}
        config["eos_token_ids"] = list(self.eos_token_ids)
        config.pop("chat_template", None)
        write_json(folder / "tokenizer_config.json", config)
        if self.chat_template is not None:
            write_text(folder / "chat_template.jinja", self.chat_template)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of steps that turn tokens into text."""
        decoder = json.loads(self._backend.to_str())["decoder"] or {}
        return frozenset(step["type"] for step in (decoder, *decoder.get("decoders", ())) if step)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise RequestError("this model has no chat template", fix="Use plain text prompts")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.filters["tojson"] = _to_json
        return environment.from_string(self.chat_template)

    def _special_text(self, name: str) -> str:
        return _token_text(self._config.get(name)) or ""


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Templates are written for plain JSON; jinja's own filter escapes it for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_texts(item, change) for item in value]
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    content = read_json(path, error=ModelError) if path.is_file() else {}
    if not isinstance(content, dict):
        raise ModelError("a tokenizer file holds no object", given=str(path))
    return content


def _token_text(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"the chat template cannot be read: {error}", given=str(path)) from None
    template = config.get("chat_template")
    return template if isinstance(template, str) else None


def _find_turn_ends(backend: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    stored = config.get("eos_token_ids")
    if stored is None:
        names = [*_TURN_ENDS[:4], _token_text(config.get("eos_token")), *_TURN_ENDS[4:]]
        named = [backend.token_to_id(name) for name in names if name]
        declared = generation.get("eos_token_id") or []
        stored = [idx for idx in named if idx is not None][:1]
        stored += declared if isinstance(declared, list) else [declared]
    if not isinstance(stored, list):
        raise ModelError("eos_token_ids must be a list of ids", given=repr(stored))
    for idx in stored:
        if isinstance(idx, bool) or not isinstance(idx, int) or idx < 0 or backend.id_to_token(idx) is None:
            raise ModelError("an end token that the tokenizer does not know", given=repr(idx))
    return stored
