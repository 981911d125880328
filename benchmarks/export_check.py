"""Do the engines' own Python classes read our folders? LMDeploy's and SGLang's, in a throw-away environment.

The engines are installed without their dependencies, beside the packages that run this script, so that torch stays
as it is; neither needs a GPU for what is asked here. A random Qwen3 is exported as SDAR and read: by transformers
with the folder's own code, by LMDeploy's config builder and its table of models, and by SGLang's configuration. Where
an engine cannot be imported, the document says why, and what its source declares is compared instead.

    make export-check ARGS="--out benchmarks/results/export_check.json"
"""

import argparse
import json
import os
import platform
import subprocess
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

import transformers

from ar2diff.export.export import ExportOptions, export_model
from ar2diff.export.matrix import LLADA2_MASK_ID, SDAR_MASK_ID
from ar2diff.models.loading import DIFFUSION_KEY
from ar2diff.testing.models import byte_tokenizer, tiny_diffusion

Reply = dict[str, Any]
ENGINES = ("lmdeploy==0.18.0", "sglang==0.5.23")
# What importing their config classes needs beyond this environment; none of them brings a torch.
NEEDED = ("mmengine-lite", "yapf", "platformdirs", "addict", "termcolor", "pybase64", "psutil")
ASK_LMDEPLOY = """
import json, sys
from transformers import AutoConfig
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.models.module_map import MODULE_MAP
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
read = ModelConfig.from_hf_config(config, sys.argv[1])
names = ("hidden_size", "num_layers", "head_dim", "vocab_size", "dllm_mask_token", "model_paradigm")
said = {name: getattr(read, name) for name in names}
print(json.dumps({**said, "class": MODULE_MAP[config.architectures[0]], "rope_theta": config.rope_theta}))
"""
ASK_SGLANG = """
import json, sys
from sglang.srt.configs.model_config import ModelConfig
read = ModelConfig(sys.argv[1], trust_remote_code=True)
print(json.dumps({"hidden_size": read.hidden_size, "head_dim": read.head_dim, "vocab_size": read.vocab_size}))
"""
READ_SGLANG = """
import ast, importlib.util, json, pathlib
root = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt")
tree = ast.parse((root / "dllm" / "config.py").read_text())
table = next(
    node.value
    for node in ast.walk(tree)
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DLLM_PARAMS"
)
masks = {}
for name, entry in zip(table.keys, table.values):
    fields = {key.value: value for key, value in zip(entry.keys, entry.values)}
    if isinstance(fields["mask_id"], ast.Constant):
        masks[name.value] = fields["mask_id"].value
print(json.dumps(masks))
"""


def write_sdar(folder: Path) -> Path:
    """A random Qwen3, exported as SDAR; returns the folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(vocab_size=SDAR_MASK_ID + 1, **sizes, **heads)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    byte_tokenizer().save(folder / "model")
    stored = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    diffusion = tiny_diffusion(mask_token_id=SDAR_MASK_ID, shift_logits=False, clean_attention="block")
    text = json.dumps({**stored, DIFFUSION_KEY: diffusion.as_json()})
    (folder / "model" / "config.json").write_text(text, encoding="utf-8")
    export_model(folder / "model", "sdar", folder / "sdar", ExportOptions())
    return folder / "sdar"


def build_environment(folder: Path) -> Path:
    """An environment that sees this one's packages, with the engines in front; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    shared = sysconfig.get_paths()["purelib"]
    own = next((folder / "lib").glob("python*/site-packages"))
    (own / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", *ENGINES, *NEEDED], check=True)
    return python


def ask(python: Path, script: str, *arguments: str) -> Reply:
    """What a script prints in the engines' environment, or the last line of its error."""
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(python.parents[1] / "cache")}
    done = subprocess.run(
        [python, "-c", script, *arguments], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    reply: Reply = json.loads(done.stdout.splitlines()[-1])
    return reply


def report() -> Reply:
    """Both engines, asked."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_sdar(Path(temporary))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        python = build_environment(Path(temporary) / "engines")
        lmdeploy = ask(python, ASK_LMDEPLOY, str(folder))
        sglang, masks = ask(python, ASK_SGLANG, str(folder)), ask(python, READ_SGLANG)
    wanted = {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "dllm_mask_token": SDAR_MASK_ID,
        "model_paradigm": "dllm",
        "class": "lmdeploy.pytorch.models.sdar.SDARForCausalLM",
        "rope_theta": config["rope_theta"],
    }
    bars = {
        "LMDeploy reads the SDAR folder": lmdeploy == wanted,
        "SGLang reads the SDAR folder": sglang.get("vocab_size") == config["vocab_size"],
        "SGLang's source names our SDAR mask": masks.get("SDARForCausalLM") == SDAR_MASK_ID,
        "SGLang's source names our LLaDA2 mask": masks.get("LLaDA2MoeModelLM") == LLADA2_MASK_ID,
    }
    return {
        "benchmark": "export_check",
        "bars": [
            {"name": name, "value": float(holds), "bar": 1.0, "better": "higher", "holds": holds}
            for name, holds in bars.items()
        ],
        "lmdeploy": lmdeploy,
        "sglang": {"config class": sglang, "masks in its source": masks},
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version(), "engines": list(ENGINES)},
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    document = report()
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
