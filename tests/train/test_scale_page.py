"""The memory arithmetic of docs/scale.md is what the decoder's shapes give, and fails where the page differs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(page):
    line = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), str(page)]
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=120)


def test_the_page_has_the_numbers_of_the_script_and_another_page_is_refused(tmp_path):
    page = ROOT / "docs" / "scale.md"
    done = check(page)
    assert done.returncode == 0, done.stderr
    changed = tmp_path / "scale.md"
    changed.write_text(page.read_text().replace("| 127 |", "| 126 |"))
    assert changed.read_text() != page.read_text()
    assert check(changed).returncode == 1


def test_the_scripts_numbers_are_those_of_a_hand_calculation():
    # Qwen3-8B: q, o: 4096 x 4096; k, v: 4096 x 1024; three of 4096 x 12288; norms of 4096 and, for q and k, of 128.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    in_layers, outside = 36 * layer, 2 * 151936 * 4096 + 4096
    positions = 3 * 4096
    kept = 4 * positions * 4096 * 36
    inside = 4 * positions * (2 * (4096 + 1024) + 4 * 4096 + 4 * 12288)
    acts = kept + inside + 2 * 4 * 256 * 151936
    full = [16 * in_layers + 4 * outside + acts] + [
        16 * in_layers / n + 12 * layer + 4 * outside + acts for n in (8, 64)
    ]
    lora = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    adapter = 4 * (in_layers + outside) + 16 * lora + acts
    numbers = [*full, adapter, acts, 4 * (in_layers + outside), 3 * 4 * 151936 * 4096]
    line = f"| Qwen3-8B | {(in_layers + outside) / 1e9:.2f} | " + " | ".join(f"{n / 1e9:.0f}" for n in numbers) + " |"
    assert line in (ROOT / "docs" / "scale.md").read_text().splitlines()
