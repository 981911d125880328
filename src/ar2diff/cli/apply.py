"""`ar2diff apply`: an exported adapter and its base become a model folder again."""

from pathlib import Path


def apply(base: Path, adapter: str, *, out: Path) -> None:
    """Put an exported adapter on its base, as a model folder for every other command.

    The base's tensors stay as they are; only the row of the mask becomes the trained one. Any other base than the
    adapter's own is refused. Repeat it at will: a folder that holds just this already is kept.

    Args:
        base: Folder of the model that the adapter was trained on, or its .gguf file.
        adapter: Folder that `ar2diff export --to adapter` wrote, or shipped:NAME for one that came with ar2diff.
        out: The new folder.
    """
    from ar2diff.models.apply import apply_adapter
    from ar2diff.pipelines.start import find_adapter

    found = find_adapter(adapter)
    applied = apply_adapter(base, found.folder, out, tensor_root=found.tensor_root)
    print(f"{'wrote' if applied.is_new else 'already there, and verified:'} {out}")
    print(f"tensor root  {applied.tensor_root}")
    print(f"its base     {applied.base_tensor_root}")
