"""scripts/study.py in small: trains what is missing and nothing else, shows it, and trains it again to the same bits;
and the GPT's example goes on from a checkpoint as if it had not been stopped."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from launcher import launch

ROOT = Path(__file__).resolve().parents[2]
STUDY = [sys.executable, str(ROOT / "scripts" / "study.py")]
LIMIT = 200.0  # seconds for a command, on a busy machine

sys.path.insert(0, str(ROOT / "examples"))
from datasets import TEXT_PROGRAM, default_folder  # noqa: E402

images = pytest.mark.skipif(
    not Path(default_folder(), "train-images-idx3-ubyte.gz").exists(), reason="Fashion-MNIST is not on this machine"
)


@images
def test_the_small_study(tmp_path: Path) -> None:
    results = tmp_path / "study.jsonl"

    def study(*arguments: str) -> str:
        done = launch([*STUDY, "--results", str(results), "--limit", "120", *arguments], LIMIT)
        assert done.status == 0, done.output
        return done.output

    assert study("run", "small").count("examples/fashion_mnist.py") == 2
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [record["method"] for record in records] == ["dense", "slim"]
    assert all(record["seed"] == 0 and record["ranks"] == 2 and len(record["curve"]) == 3 for record in records)
    assert records[1]["bytes_sent"] < 0.2 * records[1]["dense_bytes"]
    assert study("run", "small") == ""
    assert study("check", "--runs", "2").count("the same bits and bytes") == 2

    # A line that is not what the run gives is found out.
    records[1]["checksum"] = "00000000"
    results.write_text(json.dumps(records[1]) + "\n")
    done = launch([*STUDY, "--results", str(results), "check"], LIMIT)
    assert done.status == 1
    assert "DIFFERENT" in done.output


@images
def test_a_run_that_fails_is_said_and_tried_again(tmp_path: Path) -> None:
    results = tmp_path / "study.jsonl"
    done = launch([*STUDY, "--results", str(results), "--limit", "0.1", "run", "small"], LIMIT)
    assert done.status == 1
    assert "error: 2 run(s) failed" in done.output
    assert not results.exists()


def test_tables_and_charts_of_what_is_recorded(tmp_path: Path) -> None:
    results = ROOT / "examples" / "results" / "study.jsonl"
    done = launch([*STUDY, "--results", str(results), "show", "--out", str(tmp_path)], LIMIT)
    assert done.status == 0, done.output
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    # The tables that are committed are those of the runs that are committed.
    assert (tmp_path / "study.md").read_text() == (results.parent / "study.md").read_text()


def test_nothing_to_show(tmp_path: Path) -> None:
    done = launch([*STUDY, "--results", str(tmp_path / "none.jsonl"), "show"], LIMIT)
    assert done.status == 2
    assert done.output.startswith("error:")
    assert "Traceback" not in done.output


@pytest.mark.skipif(not shutil.which(TEXT_PROGRAM), reason="the King James text is not on this machine")
def test_a_gpt_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    options = ["--steps", "12", "--evals", "2", "--warmup-steps", "3", "--layers", "1", "--width", "32"]
    options += ["--batch-size", "2", "--explorer", "leader", "--exchange", "allreduce"]

    def train(name: str, *more: str) -> None:
        command = ["mpirun", "-np", "2", sys.executable, str(ROOT / "examples" / "char_gpt.py"), *options, *more]
        done = launch([*command, "--json-out", str(tmp_path / name)], LIMIT)
        assert done.status == 0, done.output

    train("whole.jsonl")
    checkpoint = ["--checkpoint", str(tmp_path / "saved")]
    train("stopped.jsonl", *checkpoint, "--stop-at", "7")
    assert not (tmp_path / "stopped.jsonl").exists()
    train("stopped.jsonl", *checkpoint)
    whole, resumed = (json.loads((tmp_path / name).read_text()) for name in ("whole.jsonl", "stopped.jsonl"))
    for key in ("checksum", "bits_per_character", "bytes_sent", "steps"):
        assert whole[key] == resumed[key]
    assert [point["test_loss"] for point in whole["curve"]] == [point["test_loss"] for point in resumed["curve"]]
