"""Every command by name: a new one is a file in this folder and a line here.

Command modules are imported for `--help`, so they stay light: torch and every room are imported inside the
command's function. The first line of the function's docstring is its line in the help.
"""

from collections.abc import Callable
from typing import Any

from ar2diff.cli.answers import answers
from ar2diff.cli.apply import apply
from ar2diff.cli.audit import audit
from ar2diff.cli.bench import bench
from ar2diff.cli.chat import chat
from ar2diff.cli.data import data
from ar2diff.cli.doctor import doctor
from ar2diff.cli.evaluate import evaluate
from ar2diff.cli.export import export
from ar2diff.cli.fetch import fetch
from ar2diff.cli.generate import generate
from ar2diff.cli.harness import harness
from ar2diff.cli.prepare import prepare
from ar2diff.cli.publish import publish
from ar2diff.cli.quickstart import quickstart
from ar2diff.cli.report import report
from ar2diff.cli.run import run
from ar2diff.cli.serve import serve
from ar2diff.cli.train import train
from ar2diff.cli.version import version

COMMANDS: dict[str, Callable[..., Any]] = {
    "quickstart": quickstart,
    "fetch": fetch,
    "doctor": doctor,
    "answers": answers,
    "prepare": prepare,
    "data": data,
    "train": train,
    "evaluate": evaluate,
    "bench": bench,
    "harness": harness,
    "report": report,
    "run": run,
    "audit": audit,
    "export": export,
    "apply": apply,
    "publish": publish,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "version": version,
}
