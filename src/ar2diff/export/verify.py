"""A strict verifier for exported folders, ours or anybody's: each trap of a format is a check with its reason.

It reads JSON and safetensors headers, and single rows of two matrices; it runs no model and no code from the folder.
The demands are stated here again, independently of the writers.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ar2diff.errors import Ar2diffError, ConfigError, ModelError
from ar2diff.files import read_json
from ar2diff.models.safetensors_file import check_header, list_shards

Shapes = dict[str, tuple[int, ...]]


class ExportFolder:
    """An exported folder as its files have it.

    Raises:
        ModelError: its config.json or its weights cannot be read at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = _read_object(path / "config.json")
        self.places = {
            name: (shard, tuple(entry["shape"]), entry["dtype"])
            for shard in list_shards(path)
            for name, entry in check_header(shard).items()
        }

    @property
    def shapes(self) -> Shapes:
        """Tensor names to shapes."""
        return {name: shape for name, (_, shape, _) in self.places.items()}

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """tokenizer.json."""
        return _read_object(self.path / "tokenizer.json")

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        return _read_object(self.path / "tokenizer_config.json")

    @cached_property
    def generation(self) -> dict[str, Any]:
        """generation_config.json."""
        return _read_object(self.path / "generation_config.json")

    @property
    def readme(self) -> str:
        """README.md, or nothing."""
        path = self.path / "README.md"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def number(self, key: str) -> int:
        """A whole number of the config.

        Raises:
            ModelError: it is none.
        """
        value = self.config.get(key)
        if type(value) is not int or value < 0:
            raise ModelError(f"config.json: {key} must be a whole number", given=repr(value))
        return value

    def rows(self, name: str, idx: int, count: int = 1) -> Tensor:
        """Rows of a matrix, fp32, shape (count, E)."""
        with safe_open(self.places[name][0], framework="pt") as stream:
            piece: Tensor = stream.get_slice(name)[idx : idx + count]
        return piece.float()


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what goes wrong in an engine where it fails, and the check: None, or what was found."""

    reason: str
    find: Callable[[ExportFolder], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check that failed: its name, what was found, and what an engine makes of that."""

    check: str
    found: str
    reason: str

    def one_line(self) -> str:
        """For people."""
        return f"{self.check}: {self.found}. {self.reason}"


def run_checks(path: Path, checks: Mapping[str, Check]) -> list[Finding]:
    """Every check that fails on a folder; a check that cannot read what it needs has failed.

    Raises:
        ConfigError: no such folder.
        ModelError: config.json or the weights cannot be read at all.
    """
    if not path.is_dir():
        raise ConfigError("no exported folder", given=str(path), fix="Check the path")
    folder = ExportFolder(path)
    findings = []
    for name, check in checks.items():
        try:
            found = check.find(folder)
        except (Ar2diffError, KeyError, OSError, UnicodeDecodeError) as error:
            found = str(error)
        if found is not None:
            findings.append(Finding(check=name, found=" ".join(found.split()), reason=check.reason))
    return findings


def field_is(key: str, wanted: Any) -> Callable[[ExportFolder], str | None]:
    """A field of config.json must be there and have this value and type."""

    def find(folder: ExportFolder) -> str | None:
        if key not in folder.config:
            return f"config.json lacks {key}"
        value = folder.config[key]
        if type(value) is not type(wanted) or value != wanted:
            return f"config.json has {key} = {value!r}, not {wanted!r}"
        return None

    return find


def fields_are_of(kinds: Mapping[str, type]) -> Callable[[ExportFolder], str | None]:
    """Fields of config.json must be there and of these exact types."""

    def find(folder: ExportFolder) -> str | None:
        wrong = [key for key, kind in kinds.items() if type(folder.config.get(key)) is not kind]
        return f"config.json: {', '.join(wrong)} missing or of another type" if wrong else None

    return find


def tensors_are(expected: Callable[[ExportFolder], Shapes]) -> Callable[[ExportFolder], str | None]:
    """Exactly these tensors, in these shapes."""

    def find(folder: ExportFolder) -> str | None:
        wanted, there = expected(folder), folder.shapes
        if lost := sorted(set(wanted) - set(there)):
            return f"tensor {lost[0]} is missing ({len(lost)} in all)"
        if odd := sorted(set(there) - set(wanted)):
            return f"tensor {odd[0]} has no place ({len(odd)} in all)"
        for name, shape in wanted.items():
            if there[name] != shape:
                return f"tensor {name} has shape {there[name]}, not {shape}"
        return None

    return find


def has_one_dtype(folder: ExportFolder) -> str | None:
    """All tensors have the dtype that config.json names."""
    words = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    found = sorted({dtype for _, _, dtype in folder.places.values()})
    named = folder.config.get("dtype", folder.config.get("torch_dtype"))
    if len(found) != 1 or words.get(found[0]) != named:
        return f"tensors are {', '.join(found)} and config.json says {named!r}"
    return None


def mask_row_is_trained(embedding: str) -> Callable[[ExportFolder], str | None]:
    """The mask's embedding row has a norm like that of a token."""

    def find(folder: ExportFolder) -> str | None:
        mask = folder.number("mask_token_id")
        rows = folder.shapes[embedding][0]
        if mask >= rows:
            return f"mask id {mask} is beyond the {rows} rows of {embedding}"
        norm = float(folder.rows(embedding, mask).norm())
        norms = folder.rows(embedding, 0, min(1000, rows)).norm(dim=1)
        typical = float(norms[norms > 0].median())  # padded rows are zero
        if not 0.1 * typical <= norm <= 10 * typical:
            return f"the mask's embedding row has norm {norm:.3g}, tokens have {typical:.3g}"
        return None

    return find


def head_never_says_mask(folder: ExportFolder) -> str | None:
    """The output matrix's mask row is zero."""
    row = folder.rows("lm_head.weight", folder.number("mask_token_id"))
    return f"the head's mask row has norm {float(row.norm()):.3g}, not 0" if bool(torch.any(row != 0)) else None


def mask_token_is_special(folder: ExportFolder) -> str | None:
    """The tokenizer declares the mask as a special token under the config's id."""
    mask = folder.number("mask_token_id")
    found = [token for token in folder.tokenizer.get("added_tokens", []) if token.get("id") == mask]
    if not found:
        return f"tokenizer.json declares no added token {mask}"
    if found[0].get("special") is not True:
        return f"token {found[0].get('content')!r} is not special"
    if folder.tokenizer_config.get("mask_token") != found[0].get("content"):
        return f"tokenizer_config.json has mask_token {folder.tokenizer_config.get('mask_token')!r}"
    return None


def end_is_declared(folder: ExportFolder) -> str | None:
    """generation_config.json names the end of a turn, and it is within the vocabulary."""
    ends = folder.generation.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    if not ids or any(type(idx) is not int or not 0 <= idx < folder.number("vocab_size") for idx in ids):
        return f"generation_config.json has eos_token_id {ends!r}"
    return None


def readme_tells(*words: str) -> Callable[[ExportFolder], str | None]:
    """README.md holds these words; `{block_size}` and the like stand for fields of the config."""

    def find(folder: ExportFolder) -> str | None:
        missing = [word for word in (word.format(**folder.config) for word in words) if word not in folder.readme]
        return f"README.md does not tell {missing[0]!r}" if missing else None

    return find


# What remote code may import: upstream modelling files hard-import GPU kernels, and then load nowhere else.
_IMPORTABLE = frozenset({"torch", "transformers", *sys.stdlib_module_names})


def remote_code_loads(folder: ExportFolder) -> str | None:
    """Every file that `auto_map` names is there, as are those beside it, and all import what every machine has."""
    named = folder.config.get("auto_map")
    if not isinstance(named, dict) or not named:
        return "config.json has no auto_map"
    waiting, seen = {str(place).split(".", 1)[0] for place in named.values()}, set[str]()
    while waiting - seen:
        module = sorted(waiting - seen)[0]
        seen.add(module)
        path = folder.path / f"{module}.py"
        if not path.is_file():
            return f"{module}.py is missing"
        try:
            absolute, beside = _list_imports(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            return f"{module}.py is no Python: {error}"
        if odd := sorted(absolute - _IMPORTABLE):
            return f"{module}.py imports {odd[0]}"
        waiting |= beside
    return None


def config_keeps_rope_theta(folder: ExportFolder) -> str | None:
    """The config class of the folder sets `rope_theta` itself; transformers 5 moves the family's into a dict."""
    place = str((folder.config.get("auto_map") or {}).get("AutoConfig"))
    path = folder.path / f"{place.split('.', 1)[0]}.py"
    if not path.is_file():
        return f"{path.name} is missing"
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kept = any(
        isinstance(n, ast.Attribute) and n.attr == "rope_theta" and isinstance(n.ctx, ast.Store) for n in nodes
    )
    return None if kept else f"{path.name} does not set rope_theta"


def _list_imports(code: str) -> tuple[set[str], set[str]]:
    """Top-level packages that a file imports, and the modules beside it."""
    absolute, beside = set[str](), set[str]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            absolute |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            beside |= {node.module} if node.module else {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            absolute.add(str(node.module).split(".")[0])
    return absolute, beside


def llama_layer(folder: ExportFolder, idx: int, *, qkv_bias: bool, output_bias: bool, head_norm: bool) -> Shapes:
    """The tensors of one layer of the Llama shape, with what Qwen adds."""
    hidden, inner = folder.number("hidden_size"), folder.number("intermediate_size")
    head = folder.number("head_dim")
    queries, keys = folder.number("num_attention_heads") * head, folder.number("num_key_value_heads") * head
    at = f"model.layers.{idx}"
    shapes: Shapes = {
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
        f"{at}.self_attn.q_proj.weight": (queries, hidden),
        f"{at}.self_attn.k_proj.weight": (keys, hidden),
        f"{at}.self_attn.v_proj.weight": (keys, hidden),
        f"{at}.self_attn.o_proj.weight": (hidden, queries),
        f"{at}.mlp.gate_proj.weight": (inner, hidden),
        f"{at}.mlp.up_proj.weight": (inner, hidden),
        f"{at}.mlp.down_proj.weight": (hidden, inner),
    }
    if qkv_bias:
        shapes |= {f"{at}.self_attn.{part}_proj.bias": (queries if part == "q" else keys,) for part in "qkv"}
    if output_bias:
        shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
    if head_norm:
        shapes |= {f"{at}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
    return shapes


def llama_tensors(folder: ExportFolder, *, qkv_bias: bool, output_bias: bool, head_norm: bool, tied: bool) -> Shapes:
    """All tensors of the Llama shape."""
    hidden, vocab = folder.number("hidden_size"), folder.number("vocab_size")
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for idx in range(folder.number("num_hidden_layers")):
        shapes |= llama_layer(folder, idx, qkv_bias=qkv_bias, output_bias=output_bias, head_norm=head_norm)
    return shapes


SIZES: dict[str, type] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
}
EMBEDDING = "model.embed_tokens.weight"

# What every target demands.
COMMON: dict[str, Check] = {
    "sizes": Check("Engines read these fields without defaults, or with wrong ones.", fields_are_of(SIZES)),
    "rope theta": Check(
        "Where rope_theta is no plain number, an engine silently takes 10000.", fields_are_of({"rope_theta": float})
    ),
    "dtype": Check("An engine casts weights to the dtype that config.json names.", has_one_dtype),
    "mask token": Check(
        "Without it the mask's text is cut into pieces, and special tokens are not skipped in answers.",
        mask_token_is_special,
    ),
    "end of turn": Check("Without it an answer never ends.", end_is_declared),
}


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path, error=ModelError)
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} holds no object", given=str(path))
    return content
