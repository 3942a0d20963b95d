"""Every case of ``cases.py`` is named by the docstring of a test, or of the module it is in, as CASES and numbers."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from cases import TITLES

MPI_TESTS = Path(__file__).resolve().parents[1]
TAG = re.compile(r"CASES ((?:\d+(?: to \d+)?(?:, and |, | and )?)+)")


def numbers(docstring: str) -> set[int]:
    """Those after the word."""
    found: set[int] = set()
    for listed in TAG.findall(docstring):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
            found.update(range(int(first), int(last or first) + 1))
    return found


@functools.cache
def pinned() -> dict[int, list[str]]:
    """The tests of every case."""
    tests: dict[int, list[str]] = {number: [] for number in TITLES}
    for file in sorted(MPI_TESTS.glob("*/test_*.py")):
        module = ast.parse(file.read_text())
        functions = [
            node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        of_module = numbers(ast.get_docstring(module) or "") if file != Path(__file__).resolve() else set()
        for function in functions:
            for number in of_module | numbers(ast.get_docstring(function) or ""):
                assert number in TITLES, f"{file.name}: {function.name} names case {number}, which there is not"
                tests[number].append(f"{file.parent.name}/{file.name}::{function.name}")
    return tests


def test_tags() -> None:
    assert numbers("CASES 1 and 3 to 5, and 9: two, 17") == {1, 3, 4, 5, 9}
    assert numbers("CASES = [1]") == set()


def test_there_are_no_gaps_in_the_list() -> None:
    assert list(TITLES) == list(range(1, 50))


@pytest.mark.parametrize("number", TITLES, ids=lambda number: f"{number}: {TITLES[number]}")
def test_every_case_is_pinned(number: int) -> None:
    assert pinned()[number], TITLES[number]
