"""Where Horovod is missing or was built without PyTorch, one line says what to do; and pip never starts its build."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: what stands in for Horovod: nothing that imports, or a build without PyTorch, which prints and has no functions
STUBS = {
    "missing": "raise ModuleNotFoundError(\"No module named 'horovod'\", name='horovod')",
    "built without PyTorch": "print('Extension horovod.torch has not been built')",
    "built for another torch": "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN2at')",
}


def run(code: str, horovod: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a script in a process in which ``horovod.torch`` is the stub."""
    package = folder / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(STUBS["missing"] if horovod == "missing" else "")
    (package / "__init__.py").write_text(STUBS[horovod])
    script = folder / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)


USES = ("hvd.init()", "hvd.rank", "hvd.Compression.none", "hvd.DistributedOptimizer(None)")
SCRIPT = f"""
import hvd_slim as hvd
from hvd_slim import arena, config, explorer, significance
print("works", hvd.Compression.slim(comm_fraction=0.5).core_count(100), config.SlimConfig is hvd.SlimConfig)
print("lists", "init" in dir(hvd), "SlimConfig" in dir(hvd))
for use in {USES!r}:
    try:
        eval(use)
        print("raised", use, None)
    except Exception as error:
        print("raised", use, type(error).__name__, error)
"""


@pytest.fixture(scope="module", params=sorted(STUBS))
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The script, run once with each stub."""
    return run(SCRIPT, request.param, tmp_path_factory.mktemp("stub"))


def said(done: subprocess.CompletedProcess[str], word: str) -> list[str]:
    """The lines of the script's output that begin with ``word``, without it."""
    return [line.removeprefix(f"{word} ") for line in done.stdout.splitlines() if line.startswith(word)]


def test_importing_says_in_one_line_what_to_do(done: subprocess.CompletedProcess[str]) -> None:
    """CASES 46."""
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert "hvd_slim needs Horovod" in lines[0]
    assert "bash scripts/setup.sh" in lines[0]
    assert "HOROVOD_WITH_PYTORCH=1 pip install" in lines[0]
    # Python shows the line of code that a warning is about.
    assert lines[1:] in ([], ["  import hvd_slim as hvd"])


@pytest.mark.parametrize("use", USES)
def test_using_it_raises_that_line(done: subprocess.CompletedProcess[str], use: str) -> None:
    """CASES 46."""
    (raised,) = [line for line in said(done, "raised") if line.startswith(use)]
    assert raised.startswith(f"{use} ImportError hvd_slim needs Horovod")
    assert "bash scripts/setup.sh" in raised


def test_what_does_not_need_it_works(done: subprocess.CompletedProcess[str]) -> None:
    assert said(done, "works") == ["15 True"]
    assert said(done, "lists") == ["False True"]


def test_submodules_import_without_horovod_and_without_mpi(tmp_path: Path) -> None:
    """Every module by itself, so that tools that only read settings or checkpoints need nothing built."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')")
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "hvd_slim").rglob("*.py")]
    modules = sorted(
        ".".join(path.parts).removesuffix(".__init__") for path in paths if path.name not in ("mpi", "elastic")
    )
    code = "import importlib, warnings\nwarnings.simplefilter('ignore')\n"
    code += "".join(f"importlib.import_module({module!r})\n" for module in modules)
    finished = run(code, "missing", tmp_path)
    assert finished.returncode == 0, finished.stderr


# Packaging -----------------------------------------------------------------------------------------------------------


def setup_arguments() -> dict[str, object]:
    """The literal keyword arguments of the call of ``setup`` in setup.py."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setup"
    ]
    found: dict[str, object] = {}
    for keyword in call.keywords:
        try:
            found[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            continue
    return found


def test_pip_never_starts_horovods_build() -> None:
    arguments = setup_arguments()
    required = arguments["install_requires"]
    assert isinstance(required, list)
    assert not [name for name in required if "horovod" in name.lower() or "mpi" in name.lower()]
    extras = arguments["extras_require"]
    assert isinstance(extras, dict)
    assert [extra for extra, names in extras.items() if any("horovod" in name for name in names)] == ["horovod"]
    assert not {"setup_requires", "build-system"} & arguments.keys()


def test_installed_metadata_agrees() -> None:
    from importlib.metadata import requires

    plain = [line for line in requires("hvd_slim") or [] if "extra ==" not in line]
    assert plain
    assert not [line for line in plain if "horovod" in line]


def test_every_package_is_packaged() -> None:
    from setuptools import find_packages

    found = set(find_packages(str(ROOT), include=["hvd_slim", "hvd_slim.*"]))
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "hvd_slim").rglob("*.py")}
    assert found == folders
