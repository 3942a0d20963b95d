"""What the documentation says is so: links lead somewhere, Python runs, commands name files and options that exist."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_slim import cli
from hvd_slim.config import SlimConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

#: of commands that are not ours
FOREIGN = {"python", "mpirun", "horovodrun", "srun", "sbatch", "printf", "eval", "source", "bash", "pip"}


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language; "" for those without."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every shell command in the page's blocks and in its text between back-quotes."""
    shell = blocks(page, "") + blocks(page, "bash")
    lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
    programs = "hvd-slim|bash|python|mpirun|sbatch|srun|horovodrun"
    lines += re.findall(rf"`((?:{programs}) [^`]*)`", prose(page).replace("\n", " "))
    for line in lines:
        line = re.sub(r"^eval \"\$\((.*)\)\"$", r"\1", line)
        for command in re.split(r"\s*(?:&&|;)\s*", line):
            words = shlex.split(command, comments=True)
            if words:
                yield words


# Links ---------------------------------------------------------------------------------------------------------------


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert file.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}: {sorted(anchors(file))}"


def test_every_page_is_linked_from_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


# Python --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """A page's blocks one after the other, in one process of one rank, in an empty folder."""
    code = "\n\n".join(blocks(page, "python"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::DeprecationWarning:hvd_slim", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# Commands ------------------------------------------------------------------------------------------------------------


def options_of(verb: str) -> set[str]:
    """The options of one verb of ``hvd-slim``."""
    (verbs,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {option for action in verbs.choices[verb]._actions for option in action.option_strings}


def options_of_script(script: str) -> set[str]:
    """The options that a script of ours names, and those of ``SlimConfig`` where examples take them."""
    text = (ROOT / script).read_text()
    found = set(re.findall(r"--[a-z][a-z-]*", text))
    if script.startswith("examples/"):
        found |= set(re.findall(r"--[a-z][a-z-]*", (ROOT / "examples" / "common.py").read_text()))
    if "add_slim_options" in text:
        found |= {"--" + field.name.replace("_", "-") for field in dataclasses.fields(SlimConfig)}
    if script.endswith(".sbatch"):
        found |= set(re.findall(r"--[a-z][a-z-]*", (ROOT / "scripts/slurm/common.sh").read_text()))
    return found


def check(words: list[str]) -> None:
    """That files of the project which a command names exist, and options of its own commands, too."""
    ours = [i for i, word in enumerate(words) if re.match(r"(scripts|examples|docs|mpi_tests|hvd_slim)/", word)]
    for i in ours:
        assert (ROOT / words[i]).exists(), f"{words[i]} in: {shlex.join(words)}"
    begins = [i for i, word in enumerate(words) if word == "hvd-slim"]
    scripts = [i for i in ours if words[i].endswith((".py", ".sh", ".sbatch"))]
    for begin in sorted(begins + scripts):
        end = min((i for i in [*begins, *scripts] if i > begin), default=len(words))
        given = [word.partition("=")[0] for word in words[begin:end] if word.startswith("--") and word != "--"]
        if begin in begins:
            if begin + 1 == len(words):
                continue  # the command's name alone
            known = options_of(words[begin + 1])
        else:
            known = options_of_script(words[begin])
            if words[begin].endswith(".sbatch"):  # what follows its own options is the user's
                given = [option for option in given if "train.py" not in words]
        for option in given:
            assert option in known, f"{option} in: {shlex.join(words)}"


@every_page
def test_commands_name_what_exists(page: Path) -> None:
    for words in commands(page):
        program = next((word for word in words if "=" not in word), words[0])
        if program.startswith("hvd-slim") or program in FOREIGN:
            check(words)


def test_a_command_that_names_nothing_is_found() -> None:
    for mistake in (
        "bash scripts/nothing.sh",
        "hvd-slim plan 1M --rank 2",
        "python examples/fashion_mnist.py --epoch 3",
    ):
        with pytest.raises(AssertionError):
            check(shlex.split(mistake))
    check(shlex.split("mpirun -np 2 python examples/fashion_mnist.py --epochs 3 --core-fraction 0.1"))


def test_examples_in_help_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """Every example of every ``--help``, read by the parser that printed it."""
    found = 0
    for verb in ("doctor", "plan", "bench", "kernels", "report"):
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        for line in re.findall(rf"hvd-slim {verb}[^\n]*", capsys.readouterr().out.partition("examples:")[2]):
            words = shlex.split(re.split(r" {3,}", line)[0].split("`")[0])
            if len(words) > 2 or verb == "doctor":
                cli.parser().parse_args(words[1:])
                found += 1
    assert found >= 10


# API reference -------------------------------------------------------------------------------------------------------


def test_the_api_reference_is_built_from_the_docstrings(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "docs.sh"), str(tmp_path)], env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "hvd_slim.html").read_text()
    import hvd_slim

    for name in set(hvd_slim.__all__) - {"elastic"}:
        assert f'id="{name}"' in page, name
    assert (tmp_path / "hvd_slim" / "planner.html").exists()
