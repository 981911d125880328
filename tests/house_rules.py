"""The house rules as functions from source text to findings; an empty list means that the rule holds.

A finding is `(line number, what is wrong)`.
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterable, Iterator

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 12
FORBIDDEN_NAME_PARTS = {"util", "utils", "helper", "helpers", "manager", "managers", "process", "handle"}
AMBIENT_READS = {
    "os.environ",
    "os.environb",
    "os.getenv",
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.perf_counter",
    "time.perf_counter_ns",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
    "torch.manual_seed",
    "torch.seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "numpy.random.seed",
    "random.seed",
    "random.random",
}
PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLE_CALLS = {"torch.load", "torch.save"}

Finding = tuple[int, str]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)


def find_long_file(source: str) -> list[Finding]:
    """A file of more than 400 lines."""
    count = len(source.splitlines())
    return [(count, f"{count} lines, {MAX_FILE_LINES} at most")] if count > MAX_FILE_LINES else []


def function_lengths(source: str) -> list[tuple[int, str, int]]:
    """`(line number, name, lines without the docstring)` of every function and method."""
    return [(node.lineno, node.name, _num_lines(node)) for node in _functions(ast.parse(source))]


def find_long_functions(source: str) -> list[Finding]:
    """Functions of more than 60 lines, their docstring not counted."""
    return [
        (line, f"{name} has {length} lines, {MAX_FUNCTION_LINES} at most")
        for line, name, length in function_lengths(source)
        if length > MAX_FUNCTION_LINES
    ]


def median_function_lines(sources: Iterable[str]) -> float:
    """The median function length over all sources; 0 where there is no function."""
    lengths = [length for source in sources for _, _, length in function_lengths(source)]
    return statistics.median(lengths) if lengths else 0.0


def forbidden_parts(name: str) -> set[str]:
    """The parts of a snake_case or CamelCase name that say nothing about what the thing does."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)} & FORBIDDEN_NAME_PARTS


def imported_modules(source: str) -> set[str]:
    """The top-level modules that a file imports, the standard library left out."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def find_forbidden_names(source: str) -> list[Finding]:
    """Functions and classes named after nothing; overrides of a library's names are let through."""
    return [
        (node.lineno, f"{node.name} says {', '.join(sorted(parts))}")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (*FUNCTION_TYPES, ast.ClassDef))
        and (parts := forbidden_parts(node.name))
        and not _is_decorated(node, "override")
    ]


def find_unannotated(source: str) -> list[Finding]:
    """Public functions and methods with an argument or a result that has no annotation."""
    return [
        (node.lineno, f"{node.name}: no annotation of {missing}")
        for node, owner in _public_definitions(ast.parse(source))
        if isinstance(node, FUNCTION_TYPES)
        for missing in _unannotated_parts(node, is_method=isinstance(owner, ast.ClassDef))
    ]


def find_undocumented(source: str) -> list[Finding]:
    """A module with code, and public classes, functions and methods, that have no docstring."""
    tree = ast.parse(source)
    module = [(1, "the module has no docstring")] if tree.body and not ast.get_docstring(tree) else []
    return module + [
        (node.lineno, f"{node.name} has no docstring")
        for node, _ in _public_definitions(tree)
        if not (node.name.startswith("__") or ast.get_docstring(node))
        and not (_is_decorated(node, "override") or _is_decorated(node, "overload"))
    ]


def find_ambient_reads(source: str) -> list[Finding]:
    """Reads of the clock, the environment or a global seed, under any import alias."""
    return _find_dotted(source, AMBIENT_READS)


def find_pickle(source: str) -> list[Finding]:
    """Imports of pickle and its kin, `torch.load`, `torch.save` and `allow_pickle`."""
    tree = ast.parse(source)
    imports = [
        (node.lineno, f"imports {name}")
        for node in ast.walk(tree)
        for name in _imported_modules(node)
        if name.split(".")[0] in PICKLE_MODULES
    ]
    allowed = [
        (node.value.lineno, "allow_pickle is not False")
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
    ]
    return imports + allowed + _find_dotted(source, PICKLE_CALLS)


def shell_lines(markdown: str) -> list[str]:
    """The command lines of all fenced blocks, without prompt, indentation and continuation lines."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)
    joined = [re.sub(r"\\\n\s*", " ", block) for block in blocks]
    return [line.strip().removeprefix("$ ") for block in joined for line in block.splitlines() if line.strip()]


def named_commands(markdown: str) -> set[str]:
    """Every X of a line `ar2diff X` in a fenced block; flags do not count."""
    start = re.compile(r"(?:[\w./]*/)?(?:python3? -m )?ar2diff +([a-z][a-z-]*)")
    return {found[1] for line in shell_lines(markdown) if (found := start.match(line))}


def named_make_targets(markdown: str) -> set[str]:
    """Every X of a line `make X` in a fenced block."""
    start = re.compile(r"make +((?:[A-Z_]+=\S+ +)*)([a-z][a-z-]*)")
    return {found[2] for line in shell_lines(markdown) if (found := start.match(line))}


def make_targets(makefile: str) -> set[str]:
    """The targets that a Makefile defines."""
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))


def _functions(tree: ast.AST) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTION_TYPES))


def _num_lines(node: FunctionNode) -> int:
    assert node.end_lineno is not None
    total = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return total
    return total - (first.end_lineno - first.lineno + 1)


def _public_definitions(tree: ast.Module) -> Iterator[tuple[FunctionNode | ast.ClassDef, ast.AST]]:
    owners: list[ast.Module | ast.ClassDef] = [tree]
    while owners:
        owner = owners.pop()
        for node in owner.body:
            if isinstance(node, (*FUNCTION_TYPES, ast.ClassDef)) and _is_public(node.name):
                yield node, owner
                owners += [node] if isinstance(node, ast.ClassDef) else []


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _is_decorated(node: FunctionNode | ast.ClassDef, name: str) -> bool:
    return any(ast.unparse(decorator).split(".")[-1] == name for decorator in node.decorator_list)


def _unannotated_parts(node: FunctionNode, *, is_method: bool) -> list[str]:
    arguments = node.args
    listed = arguments.posonlyargs + arguments.args
    if is_method and not _is_decorated(node, "staticmethod"):
        listed = listed[1:]
    listed = listed + arguments.kwonlyargs + [a for a in (arguments.vararg, arguments.kwarg) if a]
    return [a.arg for a in listed if a.annotation is None] + (["the result"] if node.returns is None else [])


def _imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def _aliases(tree: ast.AST) -> dict[str, str]:
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return known


def _find_dotted(source: str, forbidden: set[str]) -> list[Finding]:
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            head, _, tail = ast.unparse(node).partition(".")
            full = f"{aliases[head]}.{tail}".rstrip(".") if head in aliases else ""
            found |= {(node.lineno, f"uses {full}")} if full in forbidden else set()
    return sorted(found)
