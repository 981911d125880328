"""Which forward pass an engine runs: torch in the loaded dtype (recorded on a GPU), or compiled int8."""

from ar2diff.engine.config import EngineConfig
from ar2diff.engine.graphs import GraphRunner
from ar2diff.engine.native.runner import NativeRunner
from ar2diff.engine.runner import Runner
from ar2diff.errors import BuildError, UnsupportedModelError
from ar2diff.models.decoder import Decoder

AnyRunner = Runner | NativeRunner


def build_runner(decoder: Decoder, config: EngineConfig) -> tuple[AnyRunner, str]:
    """The runner that `config.precision` asks for, and one line on what was taken and why.

    Raises:
        BuildError, UnsupportedModelError: int8 was asked for and is impossible here.
    """
    if config.precision == "loaded":
        if decoder.embedding.weight.device.type == "cuda":
            return GraphRunner(decoder), f"{_dtype_word(decoder)}: as loaded, decoding passes are recorded"
        return Runner(decoder), f"{_dtype_word(decoder)}: as loaded"
    try:
        runner = build_native(decoder, config)
    except (BuildError, UnsupportedModelError) as error:
        if config.precision == "int8":
            raise
        return Runner(decoder), f"{_dtype_word(decoder)}: {error.one_line()}"
    if config.precision == "auto" and not runner.is_accelerated:
        return Runner(decoder), f"{_dtype_word(decoder)}: this processor has no byte products (AVX-512 VNNI or AVX2)"
    reason = "asked for" if config.precision == "int8" else "compiler, processor and architecture allow it"
    return runner, f"int8: {reason}"


def build_native(decoder: Decoder, config: EngineConfig) -> NativeRunner:
    """The compiled runner.

    Raises:
        BuildError, UnsupportedModelError: it is impossible here.
    """
    assert config.library_dir is not None
    return NativeRunner(decoder, cache_dir=config.library_dir, num_threads=config.num_threads)


def _dtype_word(decoder: Decoder) -> str:
    return str(decoder.embedding.weight.dtype).removeprefix("torch.")
