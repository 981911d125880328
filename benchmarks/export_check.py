"""Do the engines' own Python classes read our folders? LMDeploy's and SGLang's, in a throw-away environment.

The engines are installed without their dependencies, beside the packages that run this script, so that torch stays
as it is; neither needs a GPU for what is asked here. A random Qwen3 is exported as SDAR and read: by transformers
with the folder's own code, by LMDeploy's config builder and its table of models, and by SGLang's configuration.
Each engine gets one line: that it read the folder, what it read otherwise, or why it cannot be installed or imported
here. What SGLang's source declares is compared in any case. No engine's failure ends the check of the other.

    make export-check ARGS="--out benchmarks/results/export_check.json"
"""

import argparse
import json
import os
import platform
import subprocess
import sys
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
ENGINES = {"LMDeploy": "lmdeploy==0.18.0", "SGLang": "sglang==0.5.23"}
# What importing their config classes needs beyond this environment; none of them brings a torch.
NEEDED = ("mmengine-lite", "yapf", "platformdirs", "addict", "termcolor", "pybase64", "psutil", "orjson")
INSTALL_S, ASK_S = 900, 600
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


def say(text: str) -> None:
    """Progress, and the line of each engine."""
    print(text, file=sys.stderr, flush=True)


def build_environment(folder: Path) -> Path:
    """An environment that sees this one's packages, and what the engines' imports need; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    shared = sysconfig.get_paths()["purelib"]
    own = next((folder / "lib").glob("python*/site-packages"))
    (own / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    install(python, *NEEDED)
    return python


def install(python: Path, *packages: str) -> str | None:
    """Install packages without what they depend on; the last line of pip's error, or None."""
    say(f"installing {' '.join(packages)}")
    command = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip took more than {INSTALL_S} s"
    return last_line(done.stderr) if done.returncode else None


def last_line(text: str) -> str:
    """The end of an error, which names it."""
    return next((line for line in reversed(text.strip().splitlines()) if line.strip()), "no word of an error")


def ask(python: Path, script: str, *arguments: str) -> Reply:
    """What a script prints in the engines' environment, or the last line of its error."""
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(python.parents[1] / "cache")}
    try:
        done = subprocess.run(
            [python, "-c", script, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {ASK_S} s"}
    if done.returncode:
        return {"error": last_line(done.stderr)}
    reply: Reply = json.loads(done.stdout.splitlines()[-1])
    return reply


def describe(engine: str, said: Reply, wanted: Reply) -> str:
    """One engine's line."""
    if "error" in said:
        return f"{engine}: cannot be imported here because of: {said['error']}"
    other = [
        f"{name} {said.get(name)!r} instead of {value!r}" for name, value in wanted.items() if said.get(name) != value
    ]
    return f"{engine}: read the folder, but {'; '.join(other)}" if other else f"{engine}: read the folder"


def ask_engines(folder: Path, python: Path) -> dict[str, Reply]:
    """The answers of both engines, and the masks in SGLang's source."""
    said: dict[str, Reply] = {}
    for engine, script in (("LMDeploy", ASK_LMDEPLOY), ("SGLang", ASK_SGLANG)):
        error = install(python, ENGINES[engine])
        said[engine] = {"error": f"pip: {error}"} if error else ask(python, script, str(folder))
    return {**said, "masks": ask(python, READ_SGLANG)}


def report() -> Reply:
    """Both engines, asked."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_sdar(Path(temporary))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        said = ask_engines(folder, build_environment(Path(temporary) / "engines"))
    sizes = {name: config[name] for name in ("hidden_size", "head_dim", "vocab_size")}
    own = {"num_layers": config["num_hidden_layers"], "dllm_mask_token": SDAR_MASK_ID, "model_paradigm": "dllm"}
    own |= {"class": "lmdeploy.pytorch.models.sdar.SDARForCausalLM", "rope_theta": config["rope_theta"]}
    wanted = {"LMDeploy": sizes | own, "SGLang": sizes}
    lines = {engine: describe(engine, said[engine], facts) for engine, facts in wanted.items()}
    for line in lines.values():
        say(line)
    bars = {f"{engine} reads the SDAR folder": said[engine] == facts for engine, facts in wanted.items()}
    bars["SGLang's source names our SDAR mask"] = said["masks"].get("SDARForCausalLM") == SDAR_MASK_ID
    bars["SGLang's source names our LLaDA2 mask"] = said["masks"].get("LLaDA2MoeModelLM") == LLADA2_MASK_ID
    return {
        "benchmark": "export_check",
        "bars": [
            {"name": name, "value": float(holds), "bar": 1.0, "better": "higher", "holds": holds}
            for name, holds in bars.items()
        ],
        "engines": lines,
        "said": said,
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version(), "engines": list(ENGINES.values())},
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
