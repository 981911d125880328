"""The process that compares mathematical answers; started by `math_check`, one JSON pair a line.

The library sets signal handlers and may run for ever on a hostile formula, so it lives where it can be killed.
"""

import json
import sys


def main() -> None:
    """Answer `true` or `false` for each line `["right", "given"]`."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = (LatexExtractionConfig(), ExprExtractionConfig())
    print("ready", flush=True)
    for line in sys.stdin:
        right, given = json.loads(line)
        try:
            parsed = [parse(text, extraction_config=kinds, parsing_timeout=5) for text in (right, given)]
            same = verify(parsed[0], parsed[1], timeout_seconds=5) if all(parsed) else False
        except Exception:
            same = False
        print(json.dumps(bool(same)), flush=True)


if __name__ == "__main__":
    main()
