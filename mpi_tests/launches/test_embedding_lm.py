"""The example with a large embedding table: its words, a run of each method, resuming, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from launcher import Finished, launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 200.0  # seconds for a command, on a busy machine

sys.path.insert(0, str(EXAMPLES))
from embedding_lm import NextWord, numbered_words, questions  # noqa: E402


def test_words_are_numbered_by_frequency_without_places_of_verses() -> None:
    words, vocabulary = numbered_words("Ge1:1 In the beginning (the end).\n1Sam2:3 The end, in 7 days; a_b x9\n")
    assert words.tolist() == [2, 0, 3, 0, 1, 0, 1, 2, 4]  # the: 3 times; end, in: twice, in this order
    assert vocabulary == 5


def test_questions_are_the_words_before_a_place_and_rare_answers_are_one() -> None:
    inputs, answers = questions(torch.tensor([5, 1, 9, 2, 0]), torch.tensor([2, 4]), context=2, answers=3)
    assert inputs.tolist() == [[5, 1], [9, 2]]
    assert answers.tolist() == [3, 0]


def test_a_step_touches_the_rows_of_its_words_only() -> None:
    model = NextWord(vocabulary=50, context=2, width=4, hidden=3, answers=5)
    model(torch.tensor([[7, 9], [9, 30]])).sum().backward()
    assert model.table.weight.grad is not None
    touched = model.table.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert set(touched) <= {7, 9, 30}
    assert touched


def run(*options: str) -> Finished:
    small = ["--steps", "12", "--evals", "2", "--warmup-steps", "3", "--width", "8", "--hidden", "8", "--answers", "20"]
    return launch(["mpirun", "-np", "2", sys.executable, str(EXAMPLES / "embedding_lm.py"), *small, *options], LIMIT)


def record(path: Path) -> dict[str, Any]:
    (line,) = path.read_text().splitlines()
    loaded: dict[str, Any] = json.loads(line)
    return loaded


def book(folder: Path) -> str:
    """A text in which every word says which one follows."""
    names = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(100)]
    folder.mkdir()
    (folder / "book.txt").write_text(" ".join(names * 20))
    return str(folder)


def test_runs_that_are_stopped_go_on_to_the_same_bits(tmp_path: Path) -> None:
    slim = ["--data", book(tmp_path / "text"), "--comm-fraction", "0.1", "--core-fraction", "0.05"]
    slim += ["--explorer", "leader"]
    saved = ["--checkpoint", str(tmp_path / "saved")]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    for options in (
        ["--json-out", str(whole)],
        ["--json-out", str(parts), *saved, "--stop-at", "7"],
        ["--json-out", str(parts), *saved],
    ):
        done = run(*slim, *options)
        assert done.status == 0, done.output
    one, other = record(whole), record(parts)
    for key in ("checksum", "bits_per_word", "bytes_sent", "steps"):
        assert one[key] == other[key]
    assert one["steps"] == 12
    assert one["parameters"] == 100 * 8 + (4 * 8 + 1) * 8 + (8 + 1) * 21
    # 0.1 of the parameters by a ring, indices and the core's broadcasts beside it.
    assert 0.05 < one["ratio_to_dense"] < 0.25


def test_dense_learns_and_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = book(tmp_path / "text")
    done = run("--data", text, "--method", "dense", "--lr", "0.03", "--json-out", str(tmp_path / "dense.jsonl"))
    assert done.status == 0, done.output
    dense = record(tmp_path / "dense.jsonl")
    assert dense["ratio_to_dense"] == 1.0
    assert dense["curve"][-1]["test_loss"] < dense["curve"][0]["test_loss"]

    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("only four words here")
    done = run("--data", str(tmp_path / "short"))
    assert done.status != 0
    assert "error: the text has 4 words" in done.output
    assert "Traceback" not in done.output
