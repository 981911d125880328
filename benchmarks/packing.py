"""How full packed rows are, and how full any packing of whole documents could make them.

The bound is the linear program of cutting stock (Gilmore and Gomory, 1961): rows may be used in part, so no packing
needs fewer. Column generation with an exact knapsack; by Farley's bound a value found so far is sound even before the
end. Where documents are long against the row, as at 256 for chat answers of up to 200 tokens, the bound itself leaves
positions empty.

    python benchmarks/packing.py runs/quickstart/data
    python benchmarks/packing.py --quick

--quick draws 400 lengths in place of a prepared shard's. The last line of standard output is one JSON document.
"""

import argparse
import json
import math
import os
import platform
import time
from collections import Counter
from pathlib import Path

import numpy as np
import scipy
from scipy.optimize import linprog
from scipy.sparse import csr_array

from ar2diff import __version__
from ar2diff.data.packing import pack_documents
from ar2diff.data.shards import TokenShard

ROW_LENS = (256, 384, 512, 1024, 2048)
BAR = 0.98


def least_rows(lens: list[int], row_len: int, *, rounds: int = 600) -> int:
    """A number of rows below which no packing of whole documents can go."""
    wanted = Counter(lens)
    sizes = sorted(wanted)
    counts = np.array([wanted[size] for size in sizes], dtype=float)
    patterns = [np.where(np.arange(len(sizes)) == at, row_len // size, 0) for at, size in enumerate(sizes)]
    # The rows that the product makes are where the search starts.
    rows = {tuple(sorted(Counter(lens[at] for at in row).items())) for row in pack_documents(lens, row_len)}
    patterns += [np.array([dict(row).get(size, 0) for size in sizes]) for row in sorted(rows)]
    best = math.ceil(sum(lens) / row_len)
    for _ in range(rounds):
        matrix = csr_array(np.stack(patterns, axis=1))
        found = linprog(np.ones(len(patterns)), A_ub=-matrix, b_ub=-counts, method="highs")
        prices = -found.ineqlin.marginals
        value, pattern = _best_row(sizes, wanted, prices, row_len)
        # Prices divided by the dearest row are feasible for the dual.
        best = max(best, math.ceil(found.fun / max(value, 1.0) - 1e-6))
        if value <= 1 + 1e-9:
            break
        patterns.append(pattern)
    return best


def _best_row(sizes: list[int], wanted: Counter[int], prices: np.ndarray, row_len: int) -> tuple[float, np.ndarray]:
    # Worth of the dearest row of each length, one kind of document after the other.
    worth = np.zeros(row_len + 1)
    taken = np.zeros((len(sizes), row_len + 1), dtype=np.int64)
    for at, (size, price) in enumerate(zip(sizes, prices, strict=True)):
        before = worth.copy()
        for count in range(1, min(wanted[size], row_len // size) + 1):
            moved = before[: row_len + 1 - count * size] + count * price
            better = moved > worth[count * size :] + 1e-15
            worth[count * size :][better] = moved[better]
            taken[at, count * size :][better] = count
    room = int(worth.argmax())
    pattern = np.zeros(len(sizes), dtype=np.int64)
    for at in range(len(sizes) - 1, -1, -1):
        pattern[at] = taken[at, room]
        room -= pattern[at] * sizes[at]
    return float(worth.max()), pattern


def measure(lens: list[int], row_len: int) -> dict[str, float]:
    """Rows, the share of their positions that carry a document, and the same of the bound."""
    started_s = time.perf_counter()
    num_rows = len(pack_documents(lens, row_len))
    wall_s = time.perf_counter() - started_s
    bound = least_rows(lens, row_len)
    return {
        "rows": num_rows,
        "least_rows": bound,
        "fill": round(sum(lens) / (num_rows * row_len), 4),
        "best_fill": round(sum(lens) / (bound * row_len), 4),
        "wall_s": round(wall_s, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shard", nargs="?", type=Path, help="a folder of prepared data")
    parser.add_argument("--quick", action="store_true", help="400 drawn lengths")
    options = parser.parse_args()
    if options.quick or options.shard is None:
        lens = np.random.default_rng(0).normal(125, 35, 400).clip(40, 200).astype(int).tolist()
    else:
        lens = TokenShard(options.shard).document_lens.tolist()
    rows = {row_len: measure([n for n in lens if n <= row_len], row_len) for row_len in ROW_LENS}
    bars = [
        {
            "name": f"fill of rows of {row_len} over {BAR}, or over the most that whole documents allow",
            "value": found["fill"],
            "bar": min(BAR, found["best_fill"]),
            "better": "higher",
            "holds": found["fill"] >= min(BAR, found["best_fill"]),
        }
        for row_len, found in rows.items()
    ]
    print(
        json.dumps(
            {
                "benchmark": "packing",
                "bars": bars,
                "documents": {"count": len(lens), "longest": max(lens), "mean_len": round(float(np.mean(lens)), 1)},
                "row_lens": rows,
                "hardware": {"device": platform.machine(), "cpus": os.cpu_count()},
                "versions": {"ar2diff": __version__, "scipy": scipy.__version__, "python": platform.python_version()},
                "quick": options.quick,
            }
        )
    )


if __name__ == "__main__":
    main()
