"""`docs/cli.md` from the help texts of the commands: `make docs` writes it, a test keeps it current."""

import sys
from pathlib import Path

from ar2diff.cli import app
from ar2diff.files import write_text

HEADER = "<!-- Written by `make docs` from the help texts; edit those. -->\n\n"


def build_cli_page() -> str:
    """The command reference as Markdown, the same on every machine."""
    lines = app.generate_docs(usage_name="ar2diff").splitlines()
    return HEADER + "\n".join(line.rstrip() for line in lines).strip() + "\n"


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), build_cli_page())
