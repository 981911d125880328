"""The built wheel holds every module and runs where only the wheel and its dependencies are installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from ar2diff import __version__

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)])
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_the_type_marker(wheel: Path) -> None:
    expected = {p.relative_to(SRC).as_posix() for p in SRC.rglob("*.py")} | {"ar2diff/py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())


def test_the_wheel_holds_every_recipe_as_it_is(wheel: Path) -> None:
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert recipes
    with zipfile.ZipFile(wheel) as archive:
        assert all(archive.read(f"ar2diff/recipes/{path.name}") == path.read_bytes() for path in recipes)


def test_the_wheel_holds_the_playground_as_it_is(wheel: Path) -> None:
    folder = SRC / "ar2diff" / "serve" / "playground"
    assert (folder / "index.html").exists()
    with zipfile.ZipFile(wheel) as archive:
        for path in folder.iterdir():
            assert archive.read(path.relative_to(SRC).as_posix()) == path.read_bytes()


def test_wheel_and_source_archive_hold_a_shipped_adapter_as_it_is(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(SRC, tree / "src", ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    shutil.copytree(ROOT / "recipes", tree / "recipes")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    proofs = ("ledger.jsonl", "checkpoints.dsse.jsonl", "MODEL_CARD.md", "eval.json", "receipt.json")
    content = {name: os.urandom(32) for name in ("adapter_model.safetensors", "adapter_config.json", *proofs)}
    for folder in ("tiny", "tiny.partial-7"):
        (tree / "src" / "ar2diff" / "shipped" / folder).mkdir(parents=True)
        for name, raw in content.items():
            (tree / "src" / "ar2diff" / "shipped" / folder / name).write_bytes(raw)
    # The wheel is made out of the source archive.
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(tree)])
    wheel, archive = (next((tmp_path / "dist").glob(f"*.{kind}")) for kind in ("whl", "tar.gz"))
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if "shipped/" in name]
        assert {name.removeprefix("ar2diff/shipped/tiny/"): opened.read(name) for name in names} == content
    with tarfile.open(archive) as opened:
        root = f"ar2diff-{__version__}/src/ar2diff/shipped/tiny/"
        names = [name for name in opened.getnames() if "shipped/" in name]
        assert {name.removeprefix(root): opened.extractfile(name).read() for name in names} == content


def test_the_wheel_holds_every_shipped_adapter_of_this_tree(wheel: Path) -> None:
    paths = [path for path in (SRC / "ar2diff" / "shipped").glob("*/*") if ".partial-" not in path.parent.name]
    named = {path.relative_to(SRC).as_posix(): path for path in paths}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("ar2diff/shipped/")} == set(named)
        assert all(archive.read(name) == path.read_bytes() for name, path in named.items())


def test_the_wheel_holds_the_licence_and_nothing_beside_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith("LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"ar2diff", f"ar2diff-{__version__}.dist-info"}


def test_the_installed_wheel_runs_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    install = [sys.executable, "-m", "pip", "--python", str(folder), "install", "-qq", "--no-deps", "--no-index"]
    _run([*install, str(wheel)])
    (site / "dependencies.pth").write_text(_dependency_folders())
    command = str(folder / "bin" / "ar2diff")
    assert _run([command, "--version"], cwd=tmp_path) == f"ar2diff {__version__}\n"
    origin = _run([str(folder / "bin" / "python"), "-c", "import ar2diff; print(ar2diff.__file__)"], cwd=tmp_path)
    assert Path(origin.strip()).is_relative_to(site)
    assert "version" in _run([command, "--help"], cwd=tmp_path)
    program = "from ar2diff.pipelines.recipe import find_recipe as f, load_recipe; p = f('smollm2-135m_cpu')"
    found = _run([str(folder / "bin" / "python"), "-c", f"{program}; load_recipe(p); print(p)"], cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(site)


def _dependency_folders() -> str:
    """The running interpreter's own packages, as lines of a `.pth` file; they come after the wheel's."""
    return "\n".join(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})) + "\n"


def _run(command: list[str], *, cwd: Path = ROOT) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("COV")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
