"""How long file and tensor claims of a 2B model take: `python benchmarks/audit.py [--quick]`; the last line is JSON.

Makes a run with 5 GB of bf16 safetensors as base and as checkpoint (one file under two names), audits it in a process
of its own and removes it. Bars: 60 s and 1 GiB of memory on two cores.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ar2diff import __version__
from ar2diff.audit.claims.base import expected_shapes
from ar2diff.audit.tensor_files import both_roots, list_tensors
from ar2diff.clock import SystemClock
from ar2diff.files import write_json, write_text
from ar2diff.hashing import sha256_file, sha256_json
from ar2diff.provenance.documents import write_all_documents
from ar2diff.provenance.environment import describe_session, describe_stage
from ar2diff.provenance.git_objects import build_repository, digest_file, object_id, write_commit, write_pointer
from ar2diff.provenance.ledger import Ledger
from ar2diff.provenance.signing import HeadSigner
from ar2diff.sources.git_fetch import write_git_objects
from ar2diff.sources.receipt import FileReceipt, Receipt, TreeEntry, write_receipt

BAR_SECONDS, BAR_BYTES = 60.0, 1 << 30
CLAIMS = ("A1", "A2", "A3", "A4", "A11", "A12", "A18")
DIFFUSION = {
    "block_size": 8,
    "trained_block_sizes": [8],
    "shift_logits": True,
    "mask_token_id": 9,
    "clean_attention": "causal",
}
CHILD = """
import json, resource, sys, time
from pathlib import Path
from ar2diff.audit.verify import audit_run
started_s = time.perf_counter()
report = audit_run(Path(sys.argv[1]), only=tuple(sys.argv[2].split(",")))
seconds = time.perf_counter() - started_s
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
verdicts = {claim.id: claim.verdict for claim in report.claims}
print(json.dumps({"seconds": seconds, "rss_bytes": rss, "verdicts": verdicts, "torch": "torch" in sys.modules}))
"""


def build_config(num_layers: int, hidden_size: int) -> dict[str, Any]:
    """A Llama config; 34 layers of 2,304 make 5 GB in bf16."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 8 // 3,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 49152,
        "dtype": "bfloat16",
    }


def write_weights(path: Path, config: dict[str, Any]) -> int:
    """Random finite bf16 tensors of the config's names and shapes; returns the file's size in bytes."""
    random = np.random.default_rng(0)
    # The sign and exponents up to 1: no infinity, no NaN.
    block = (random.integers(0, 1 << 16, 1 << 23, dtype=np.uint16) & 0xBFFF).tobytes()
    entries, end = {}, 0
    for name, shape in expected_shapes(config).items():
        size = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for left in range(end, 0, -len(block)):
            stream.write(block[: min(left, len(block))])
    return path.stat().st_size


def build_run(folder: Path, config: dict[str, Any]) -> int:
    """A run directory whose records fit its files; returns the size of the weights."""
    run = folder / "run"
    (run / "base").mkdir(parents=True)
    size = write_weights(run / "base/model.safetensors", config)
    write_json(run / "base/config.json", config)
    signer, clock = HeadSigner.generate(), SystemClock()
    ledger = Ledger.open(
        run,
        clock=clock,
        run_id="benchmark",
        signer=signer,
        session=describe_session({}),
        look_around=lambda: describe_stage({}, []),
    )
    with ledger:
        ledger.append("fetch", record_fetch(run / "base"))
        roots = both_roots(list_tensors(run / "base"), tied_head=False)
        objective = {"shift_logits": True, "clean_attention": "causal", "block_sizes": [8]}
        started = {
            "config": {"objective": objective},
            "base": "benchmark",
            "missing": [],
            "unexpected": [],
            "step": 0,
        }
        started |= {"base_tensor_root": roots.stored, "live_tensor_root": roots.live, "mask_token_id": 9}
        ledger.append("train_started", started)
        digest = write_checkpoint(run, config, roots.stored)
        ledger.append("checkpoint_saved", {"step": 1, "tensor_root": roots.stored, "state_sha256": digest})
        ended = {"step": 1, "elapsed_s": 0.5, "tensor_root": roots.stored, "checkpoint": "step-000001"}
        ledger.append("train_finished", ended)
    write_all_documents(run)
    return size


def record_fetch(base: Path) -> dict[str, Any]:
    """Receipt and git objects of a commit that holds the two files; returns the data of the fetch event."""
    digests = {path.name: digest_file(path) for path in sorted(base.iterdir())}
    held = {"config.json": (base / "config.json").read_bytes()}
    weights = digests["model.safetensors"]
    held["model.safetensors"] = write_pointer(weights.sha256, weights.size_bytes)
    tree_id, objects = build_repository(held)
    commit = write_commit(tree_id, message="one")
    revision = object_id("commit", commit)
    files = tuple(
        FileReceipt(path=name, size_bytes=d.size_bytes, sha256=d.sha256, url="http://hub/x", status=200)
        for name, d in digests.items()
    )
    entries = [("config.json", digests["config.json"].blob_id, None)]
    entries.append(("model.safetensors", object_id("blob", held["model.safetensors"]), weights.sha256))
    tree = tuple(TreeEntry(path=path, type="file", oid=oid, sha256=sha256) for path, oid, sha256 in entries)
    receipt = Receipt(source=f"hub:maker/two@{revision}", kind="hub", revision=revision, files=files, tree=tree)
    write_receipt(base, receipt)
    write_git_objects(base, {revision: commit, tree_id: objects[tree_id]})
    content = receipt.as_json()
    listed = content.pop("tree")
    listing = {"entries": len(listed), "sha256": sha256_json(listed)}
    return content | {"folder": "base", "cached": False, "elapsed_s": 0.5, "tree": listing}


def write_checkpoint(run: Path, config: dict[str, Any], root: str) -> str:
    """The base's weights again, as what a training ended with; returns the digest of its state."""
    checkpoint = run / "checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").hardlink_to(run / "base/model.safetensors")
    write_json(checkpoint / "config.json", config | {"ar2diff": DIFFUSION})
    files = {path.name: sha256_file(path) for path in sorted(checkpoint.iterdir())}
    write_json(checkpoint / "training.json", {"base_tensor_root": root, "tensor_root": root, "files": files})
    digest = sha256_file(checkpoint / "training.json")
    write_text(checkpoint / "COMPLETE", digest + "\n")
    return digest


def audit(run: Path) -> dict[str, Any]:
    """Seconds, memory and verdicts of the file and tensor claims, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run), ",".join(CLAIMS)], capture_output=True, text=True, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="0.2 GB instead of 5 GB")
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    arguments = parser.parse_args()
    config = build_config(4, 768) if arguments.quick else build_config(34, 2304)
    needed = 1_000_000_000 if arguments.quick else 12_000_000_000
    if shutil.disk_usage(arguments.folder).free < needed:
        sys.exit(f"{needed / 1e9:.0f} GB of free disk are needed in {arguments.folder}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        size = build_run(Path(folder), config)
        told = audit(Path(folder) / "run")
    bars = [
        ("audit_file_claims_s", told["seconds"], BAR_SECONDS),
        ("audit_file_claims_rss_bytes", told["rss_bytes"], BAR_BYTES),
        ("claims_that_do_not_pass", sum(verdict != "pass" for verdict in told["verdicts"].values()), 0),
    ]
    document = {
        "benchmark": "audit",
        "quick": arguments.quick,
        "bars": [
            {"name": name, "value": round(value, 2), "bar": bar, "better": "lower", "holds": value <= bar}
            for name, value, bar in bars
        ],
        "weights_bytes": size,
        **told,
        "hardware": {"machine": platform.machine(), "num_cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "ar2diff": __version__, "numpy": version("numpy")},
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
