"""The built wheel holds every module and runs where only the wheel and its dependencies are installed."""

import os
import subprocess
import sys
import sysconfig
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
