"""The sources keep the house rules, and each rule catches what it is for."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path

import house_rules as rules
import pytest

from ar2diff.cli.table import COMMANDS

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PRODUCT = sorted(SRC.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BELOW_CLI = [p for p in PRODUCT if "cli" not in p.relative_to(SRC).parts and p.name != "clock.py"]
TORCH_FREE = ("sources", "tasks", "data", "provenance", "errors", "files", "hashing", "seeding", "tokenizer", "clock")
HEAVY = ("torch", "transformers", "pyarrow", "matplotlib", "numpy", "safetensors", "tokenizers", "huggingface_hub")

CLEAN = '''"""A module."""

import time


def add(left: int, right: int) -> int:
    """The sum."""
    time.sleep(0)
    return left + right
'''

RULES: dict[str, tuple[Callable[[str], list[rules.Finding]], list[Path], str]] = {
    "file size": (rules.find_long_file, PRODUCT + TESTS, "x = 1\n" * 401),
    "function size": (rules.find_long_functions, PRODUCT + TESTS, "def f():\n" + "    x = 1\n" * 60),
    "names": (rules.find_forbidden_names, PRODUCT, "class CacheManager: ..."),
    "annotations": (rules.find_unannotated, PRODUCT, "class A:\n    def f(self, x) -> None: ..."),
    "docstrings": (rules.find_undocumented, PRODUCT, '"""m"""\nclass A:\n    """a"""\n    def f(self) -> None: ...'),
    "ambient reads": (rules.find_ambient_reads, BELOW_CLI, "from os import environ as e\nhome = e['HOME']"),
    "pickle": (rules.find_pickle, PRODUCT + TESTS, "import torch as t\nt.load('x')"),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_sources_keep_the_rule(rule: str) -> None:
    find, paths, _ = RULES[rule]
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in paths
        for line, what in find(path.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_catches_a_violation_and_lets_clean_code_pass(rule: str) -> None:
    find, _, violation = RULES[rule]
    assert find(violation)
    assert not find(
        '"""A module."""\n\n\ndef add(left: int, right: int) -> int:\n    """Sum."""\n    return left + right\n'
    )


@pytest.mark.parametrize(
    ("find", "source"),
    [
        (rules.find_ambient_reads, "import time\nstart = time.time()"),
        (rules.find_ambient_reads, "from datetime import datetime\nnow = datetime.now()"),
        (rules.find_ambient_reads, "import torch\ntorch.manual_seed(0)"),
        (rules.find_ambient_reads, "import numpy as np\nnp.random.seed(0)"),
        (rules.find_pickle, "from pickle import loads"),
        (rules.find_pickle, "import numpy as np\nnp.load('x', allow_pickle=True)"),
        (rules.find_unannotated, "def f(x: int): ..."),
        (rules.find_unannotated, "def f(*args) -> None: ..."),
        (rules.find_undocumented, "x = 1"),
        (rules.find_forbidden_names, "def process_rows() -> None: ..."),
    ],
)
def test_other_spellings_of_a_violation_are_caught(find: Callable[[str], list[rules.Finding]], source: str) -> None:
    assert find(source)


@pytest.mark.parametrize(
    ("find", "source"),
    [
        (rules.find_ambient_reads, "import torch\ntorch.Generator().manual_seed(7)"),
        (rules.find_ambient_reads, "def f(clock: Clock) -> float:\n    return clock.time()"),
        (rules.find_forbidden_names, "@override\ndef handle(self) -> None: ..."),
        (rules.find_forbidden_names, "def read_processor_count() -> None: ..."),
        (rules.find_pickle, "import numpy as np\nnp.load('x', allow_pickle=False)"),
        (rules.find_undocumented, ""),
    ],
)
def test_near_misses_are_let_through(find: Callable[[str], list[rules.Finding]], source: str) -> None:
    assert not find(source)


def test_the_median_function_is_short() -> None:
    assert rules.median_function_lines(["def f():\n" + "    x = 1\n" * 12]) > rules.MAX_MEDIAN_FUNCTION_LINES
    assert rules.median_function_lines(p.read_text() for p in PRODUCT) < rules.MAX_MEDIAN_FUNCTION_LINES


def test_no_module_is_named_after_nothing() -> None:
    assert rules.forbidden_parts("io_utils") == {"utils"}
    assert not {str(p.relative_to(ROOT)) for p in PRODUCT for part in p.parts[-3:] if rules.forbidden_parts(part)}


def test_test_files_have_unique_names() -> None:
    names = [p.name for p in TESTS if p.name.startswith("test_")]
    assert sorted(set(names)) == sorted(names)


def test_what_scripts_and_tests_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    wanted = [project["project"]["dependencies"], *extras, project["dependency-groups"]["dev"]]
    declared = set(re.findall(r"[a-z][\w-]*", " ".join(line.lower() for lines in wanted for line in lines)))
    scripts = [*TESTS, *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    ours = {"ar2diff", *(path.stem for path in scripts)}
    found = packages_distributions()
    imported = {(name, path) for path in scripts for name in rules.imported_modules(path.read_text()) - ours}
    assert ("numpy", ROOT / "benchmarks" / "packing.py") in imported
    undeclared = [
        f"{path.relative_to(ROOT)} imports {name}"
        for name, path in imported
        if declared.isdisjoint(part.lower().replace("_", "-") for part in found.get(name, [name]))
    ]
    assert not undeclared, "\n".join(undeclared)


STANDARD_IMPORTS = "import asyncio, decimal, email, http.client, inspect, sqlite3, unittest, xml.dom.minidom"


def test_help_loads_nothing_heavy_and_takes_under_half_a_second_of_cpu() -> None:
    code = "from ar2diff.cli import run; run(['--help'])"
    probes = [_probe(code) for _ in range(3)]
    assert not set(HEAVY) & set(probes[0]["modules"])
    # Beside other programs, or on an old core, everything takes longer: so does what the standard library loads.
    usual = min(_probe(STANDARD_IMPORTS)["cpu_s"] for _ in range(3))
    assert min(probe["cpu_s"] for probe in probes) < max(0.5, 9 * usual)


def test_torch_free_rooms_load_no_torch() -> None:
    """Holds for what libraries pull in too, which the import contracts cannot see."""
    modules = [m for m in _module_names() if m.split(".")[1:2] and m.split(".")[1] in TORCH_FREE]
    assert "ar2diff.provenance.ledger" in modules
    loaded = _probe("\n".join(f"import {m}" for m in modules))["modules"]
    assert "numpy" in loaded
    assert "torch" not in loaded


def test_import_contracts_know_every_torch_free_room() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(c for c in config["contracts"] if c["id"] == "no-torch")
    existing = {f"ar2diff.{name}" for name in TORCH_FREE if (SRC / "ar2diff" / name).exists()}
    existing |= {f"ar2diff.{name}" for name in TORCH_FREE if (SRC / "ar2diff" / f"{name}.py").exists()}
    assert set(contract["source_modules"]) == existing


def test_readme_names_only_commands_and_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert rules.named_commands(readme) <= set(COMMANDS)
    assert rules.named_make_targets(readme) <= rules.make_targets((ROOT / "Makefile").read_text())


def test_commands_and_targets_are_found_in_fenced_blocks_only() -> None:
    fenced = "$ ar2diff train x \\\n  --y\n.venv/bin/ar2diff run\nmake A=1 test\nar2diff --help"
    page = f"`ar2diff prose`\n```bash\n{fenced}\n```\nmake prose\n"
    assert rules.named_commands(page) == {"train", "run"}
    assert rules.named_make_targets(page) == {"test"}


def _module_names() -> list[str]:
    relative = [p.relative_to(SRC).with_suffix("") for p in PRODUCT if p.name != "__main__.py"]
    return [".".join(p.parts).removesuffix(".__init__") for p in relative]


def _probe(code: str) -> dict[str, list[str] | float]:
    """The top-level modules loaded and the CPU seconds used by a fresh interpreter that runs `code`."""
    modules = "sorted({name.split('.')[0] for name in sys.modules})"
    report = f"print('\\n' + json.dumps({{'modules': {modules}, 'cpu_s': time.process_time()}}))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    command = [sys.executable, "-c", f"{code}\nimport json, sys, time\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])
