"""`ar2diff export`: a converted model in another engine's format, checked offline before it leaves."""

from pathlib import Path


def export(
    model: Path | None = None,
    *,
    to: str,
    out: Path | None = None,
    verify: Path | None = None,
    merge: bool = False,
    dtype: str | None = None,
    quantisation: str = "f16",
) -> int:
    """Write a converted model in another engine's format, or verify such a folder.

    Args:
        model: The run directory, checkpoint or release to export.
        to: sdar, fast-dllm-v2, stable-diffcoder, llada2-dense, hf, gguf or adapter.
        out: The new folder; MODEL-TO beside the model by default.
        verify: Check this folder against the format instead, ours or not; exit code 1 where it fails.
        merge: Merge a mask-gated adapter into the weights; the AR mode is then no longer the parent's.
        dtype: fp32, bf16 or fp16; as stored by default.
        quantisation: Of a GGUF file: f32, f16, bf16, q8_0 or q4_0.
    """
    from ar2diff.cli.serve import find_model
    from ar2diff.errors import ConfigError
    from ar2diff.export.export import CHECKS, ExportOptions, export_model, verify_export
    from ar2diff.export.matrix import TARGETS

    if verify is not None:
        findings = verify_export(verify, to)
        for finding in findings:
            print(f"FAIL {finding.one_line()}")
        count = f"{len(CHECKS[to])} checks" if to in CHECKS else "all checks"
        print(f"{verify}: {'does not pass' if findings else f'passes {count}'} as {to}")
        return 1 if findings else 0
    if model is None:
        raise ConfigError("no model is named", fix="Write `ar2diff export MODEL --to hf`, or --verify FOLDER")
    folder = find_model(model)
    out = out or model.with_name(f"{model.name}-{to}")
    export_model(folder, to, out, ExportOptions(dtype=dtype, quantisation=quantisation, merge=merge))
    print(f"wrote and verified {out} ({to}: for {TARGETS[to].engines})")
    if not TARGETS[to].is_checked:
        print("experimental: no engine has run this format here yet")
    print(f"how to run it: {out / 'README.md'}")
    return 0
