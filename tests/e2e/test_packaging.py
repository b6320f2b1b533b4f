"""What is installed, and that it is found from anywhere, the repository root with its ``kernels`` folder included."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from source_tree import modules

ROOT = Path(__file__).parent.parent.parent

LIST_INSTALLED = """
import oslo_engine.kernels, oslo_engine.topology
from importlib import resources
print(oslo_engine.kernels.__file__)
print(*sorted(file.name for file in resources.files("oslo_engine.policies").iterdir() if file.name.endswith(".yaml")))
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Standard output of a command; without the tests' own Python path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def policy_files(root: Path) -> list[str]:
    return sorted(file.name for file in (root / "policies").glob("*.yaml"))


@pytest.fixture(params=["root", "elsewhere"])
def cwd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return ROOT if request.param == "root" else tmp_path


def test_subpackages_outside_the_package_folder_are_found_without_installing(cwd: Path) -> None:
    nothing_installed = "-S"
    kernels, policies = run(sys.executable, nothing_installed, "-c", LIST_INSTALLED, cwd=cwd, PYTHONPATH=str(ROOT)).splitlines()
    assert Path(kernels) == ROOT / "kernels" / "__init__.py"
    assert policies.split() == policy_files(ROOT)


def test_transformers_does_not_take_the_folder_for_the_kernels_package() -> None:
    code = """
import transformers.integrations.hub_kernels
from transformers.utils.import_utils import is_kernels_available
print(is_kernels_available())
"""
    is_installed = any(distribution.name == "kernels" for distribution in importlib.metadata.distributions())
    assert run(sys.executable, "-c", code, cwd=ROOT) in (("False", "True") if is_installed else ("False",))


def test_plain_kernels_is_the_package_of_that_name_found_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from kernels.layer import mode\n__version__ = '9.9'")
    (tmp_path / "kernels" / "layer.py").write_text("mode = 'real'")
    code = "import kernels, kernels.layer, oslo_engine.kernels as ours; print(kernels.__version__, kernels.mode, ours.__name__)"
    assert run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=str(tmp_path)) == "9.9 real oslo_engine.kernels"


def test_plain_kernels_is_empty_where_there_is_no_such_package() -> None:
    code = """
import sys
sys.path = [entry for entry in sys.path if "site-packages" not in entry]
import kernels
assert not hasattr(kernels, "__version__")
for statement in ("from kernels import get_kernel", "import kernels.layer", "from kernels.layer import mode"):
    try:
        exec(statement)
    except ImportError as error:
        print(type(error).__name__)
"""
    assert run(sys.executable, "-c", code, cwd=ROOT).split() == ["ImportError", "ModuleNotFoundError", "ModuleNotFoundError"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in, since builds write into the source folder."""
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "source", ignore=unwanted)


@pytest.fixture(scope="module", params=["from the source", "from the sdist"])
def wheel(request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    only_wheel = ["--wheel"] if request.param == "from the source" else []  # by default build makes the wheel from its sdist
    run(sys.executable, "-m", "build", "--no-isolation", *only_wheel, "--outdir", out, tree, cwd=out)
    assert bool(list(out.glob("*.tar.gz"))) != bool(only_wheel)
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_wheel_has_every_module_and_policy_and_nothing_else(wheel: Path, tree: Path) -> None:
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    own = [file.relative_to(tree / "oslo_engine") for kind in ("*.py", "*.html") for file in (tree / "oslo_engine").rglob(kind)]
    expected = {f"oslo_engine/{file}" for file in own}
    expected |= {f"oslo_engine/kernels/{file.relative_to(tree / 'kernels')}" for file in (tree / "kernels").rglob("*.py")}
    expected |= {f"oslo_engine/policies/{name}" for name in [*policy_files(tree), "coverage.json", "__init__.py"]}
    assert packaged == expected
    assert len(expected) > len(modules(tree))


@pytest.mark.slow
def test_wheel_is_found_from_elsewhere_and_has_the_command(wheel: Path, tree: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    kernels, policies = run(sys.executable, "-c", LIST_INSTALLED, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert Path(kernels).is_relative_to(site)
    assert policies.split() == policy_files(tree)
    assert "oslo-engine = oslo_engine.cli.main:main" in next(site.glob("*.dist-info/entry_points.txt")).read_text()


@pytest.mark.slow
def test_editable_install_is_found_from_the_root_and_from_elsewhere(tree: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path)
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])  # for setuptools; its .pth files do not count
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, "--editable", tree, cwd=tmp_path)
    for cwd in (tmp_path, tree):
        kernels, policies = run(python, "-c", LIST_INSTALLED, cwd=cwd).splitlines()
        assert Path(kernels) == tree / "kernels" / "__init__.py"
        assert policies.split() == policy_files(tree)
