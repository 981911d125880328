"""The compiled library as Python calls it: the C structures of `csrc/native.h`, field by field."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

TILE, GROUP = 32, 32
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class Matrix(Structure):
    """Packed int8 weights; `tiles` and `bias` are addresses."""

    _fields_ = (
        ("tiles", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("num_tiles", "num_groups", "num_extra")),
    )


class Layer(Structure):
    """One layer's weights."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, Matrix) for name in ("qkv_update", "output_update", "gate_up_update", "down_update")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("rotary", c_int64),
    )


class Model(Structure):
    """All weights and sizes."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("head", Matrix),
        ("final_norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("hidden_size", "intermediate_size", "vocab_size", "activation")),
        ("norm_eps", c_double),
        *((name, c_float) for name in ("softmax_scale", "residual_scale", "logit_scale")),
    )


class Segment(Structure):
    """The rows of one sequence in a pass, with their mask and their pages."""

    _fields_ = (
        *((name, c_int64) for name in ("first_row", "num_rows", "prefix_len")),
        *((name, c_void_p) for name in ("mask", "pages")),
    )


class Pass(Structure):
    """One forward pass: its rows, whose they are, and the store of keys and values."""

    _fields_ = (
        *((name, c_int64) for name in ("num_rows", "num_segments")),
        ("segments", POINTER(Segment)),
        *((name, c_void_p) for name in ("x", "cos", "sin", "gate", "keys", "values")),
        *((name, c_int64) for name in ("capacity", "page_size")),
    )


@lru_cache(maxsize=8)
def load_library(path: Path) -> ctypes.CDLL:
    """The library with its functions' types declared. Calls release Python's lock."""
    library = ctypes.CDLL(str(path))
    signatures = {
        "ar2_open": (c_void_p, (POINTER(Model), c_int64)),
        "ar2_close": (None, (c_void_p,)),
        "ar2_forward": (c_int64, (c_void_p, POINTER(Pass))),
        "ar2_logits": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p)),
        "ar2_multiply": (c_int64, (POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64)),
        "ar2_group": (c_int64, ()),
        "ar2_uses_byte_products": (c_int64, ()),
    }
    for name, (result, arguments) in signatures.items():
        function = library[name]
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    assert library.ar2_group() == GROUP
    return library
