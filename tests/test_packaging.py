"""What is installed, what it may import, and that it is ours that runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import goinfer_chat

ROOT = Path(goinfer_chat.__file__).parent.parent
OURS = {"engine", "tools", "goinfer_chat"}


def modules(package: str) -> Iterator[Path]:
    yield from (ROOT / package).rglob("*.py")


def imported(path: Path) -> set[str]:
    """Top-level names of everything a module imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(path.relative_to(ROOT).parts[0] if node.level else (node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize(("package", "allowed"), [("engine", {"engine"}), ("tools", {"tools"}), ("goinfer_chat", OURS)])
def test_imports_run_one_way(package: str, allowed: set[str]) -> None:
    paths = list(modules(package))
    assert paths
    wrong = {str(path.relative_to(ROOT)): names for path in paths if (names := (imported(path) & OURS) - allowed)}
    assert wrong == {}


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["torch"], *extras["keyring"]]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in requirements}  # type: ignore[index]
    declared.add("markdown_it" if "markdown_it_py" in declared else "")  # the one that is imported by another name
    used = {name for package in OURS for path in modules(package) for name in imported(path)}
    assert used - set(sys.stdlib_module_names) - OURS <= declared


def test_the_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"```sh\n(.+)\n```", (ROOT / "README.md").read_text("utf-8"))[:2]
    assert [command.split()[-1] for command in commands] == [".venv/bin/goinfer-chat", ".venv/bin/pytest"]
    assert f"\n{commands[1]} || exit\n" in (ROOT / ".ci/run").read_text("utf-8")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A user's project whose own modules have the names of ours, of dependencies and of the standard library."""
    for name in ("engine", "tools", "numpy", "rich", "typer", "json", "shutil", "platformdirs"):
        (tmp_path / name).mkdir()
        code = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r}); raise SystemExit('the wrong {name}')"
        (tmp_path / name / "__init__.py").write_text(code)
    return tmp_path


def python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_run_as_a_module_in_a_folder_with_such_names_ours_runs_and_none_of_theirs(trap: Path) -> None:
    result = python("-m", "goinfer_chat", "models", folder=trap, GOINFER_CHAT_MODELS=str(trap / "models"))
    assert result.returncode == 0, result.stderr
    assert "smollm2-135m" in result.stdout
    assert not (trap / "ran").exists()


def test_engine_and_tools_are_ours_even_where_pythonpath_names_such_a_folder(trap: Path) -> None:
    for name in {path.name for path in trap.iterdir()} - OURS:
        (trap / name / "__init__.py").unlink()
        (trap / name).rmdir()
    code = "import goinfer_chat, engine.errors, tools; print(engine.errors.__file__); print(tools.__file__)"
    result = python("-c", code, folder=trap, PYTHONPATH=os.pathsep.join([str(trap), *sys.path]))
    assert result.stdout.splitlines() == [str(ROOT / "engine/errors.py"), str(ROOT / "tools/__init__.py")], (
        result.stderr
    )
    assert not (trap / "ran").exists()


def test_run_as_a_module_in_its_own_checkout_it_needs_no_installation(tmp_path: Path) -> None:
    result = python("-m", "goinfer_chat", "--version", folder=ROOT)
    assert result.stdout == f"goinfer-chat {goinfer_chat.__version__}\n"


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
sys.argv = ["goinfer-chat", "--help"]
from goinfer_chat.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
heavy = {"torch", "numba", "llvmlite", "numpy", "huggingface_hub", "tokenizers", "jinja2"}
print("heavy:", sorted(heavy & set(sys.modules)))
"""
    result = python("-c", code, folder=tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert "Usage: goinfer-chat" in result.stdout
    assert result.stdout.endswith("heavy: []\n"), result.stderr


@pytest.mark.slow
def test_a_wheel_holds_the_three_packages_and_the_licence(tmp_path: Path) -> None:
    """Slow, because pip fetches the build backend."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *OURS):
        (copy / name).symlink_to(ROOT / name)
    result = python(
        "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(copy), folder=tmp_path
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"goinfer_chat-{goinfer_chat.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*OURS, info}
    assert f"{info}/licenses/LICENSE" in names
    assert {name for name in names if name.endswith(".py")} == {
        str(path.relative_to(ROOT)) for package in OURS for path in modules(package)
    }
