"""What is built and installed, not the source tree: a wheel beside an application whose modules are named as ours are.

The environment is empty but for the wheel. Its dependencies are those of the tests' own environment, through a .pth
file: downloading them again would take minutes. The source tree is not in its path.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("common", "fissile", "router", "worker", "pyproject.toml", "setup.py", "README.md", "LICENSE")
PYTHON = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = [code for code in PYTHON if "from fissile import" in code]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory) -> Path:
    """Of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / "source" / name)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    (wheel,) = folder.glob("*.whl")
    run(*PIP, "--python", folder / "venv/bin/python", "install", "--no-deps", "--no-index", wheel)
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{Path(grpc.__file__).parents[1]}\n")
    return folder / "venv/bin"


@pytest.fixture
def application(tmp_path) -> Path:
    """A directory with modules of its own, called as ours are; those of the services must not be imported."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").write_text("OWNER = 'the application'\n")
    for name in ("router.py", "worker.py"):
        (tmp_path / name).write_text("raise AssertionError('the application was taken for the service')\n")
    return tmp_path


def run(*command, **options) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_readme_has_an_example_to_run():
    assert len(EXAMPLES) == 1


def test_the_example_of_the_readme_runs_in_an_application_with_a_common_of_its_own(bin_folder, application, address):
    code = EXAMPLES[0].replace("localhost:50051", address)
    (application / "app.py").write_text(f"import common\n{code}\nprint(common.OWNER)\n")
    said = run(bin_folder / "python", "app.py", cwd=application)
    assert said.startswith("The quick brown fox1messages Usage(")
    assert said.endswith("\n1messages\nthe application\n")


def test_the_wheel_gives_no_name_but_its_own(bin_folder, tmp_path):
    code = "from importlib.util import find_spec\nprint([n for n in ('common', 'router', 'worker') if find_spec(n)])"
    assert run(bin_folder / "python", "-c", code, cwd=tmp_path) == "[]\n"


@pytest.mark.parametrize(
    ("name", "variable"),
    [("router", "FISSILE_ROUTER_PORT"), ("worker", "FISSILE_WORKER_PORT"), ("join", "FISSILE_RANKS_SECRET")],
)
def test_a_service_is_ours_also_where_the_application_comes_first(bin_folder, application, name, variable):
    (application / "common/config.py").write_text("raise AssertionError('the application was taken for ours')\n")
    environment = {"PYTHONPATH": str(application)}
    said = run(bin_folder / "fissile", name, "--help", cwd=application, env=environment)
    assert variable in said


def test_the_command_talks_to_a_router(bin_folder, application, address):
    assert run(bin_folder / "fissile", "generate", "one two", "-a", address, cwd=application) == "one two\n"
