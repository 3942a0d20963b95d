"""``hvd-slim report``: runs are read as they were written, and the page reads well where it is opened."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hvd_slim import cli
from hvd_slim.cli.run_charts import step_milliseconds
from hvd_slim.cli.runs import ACTIVITIES, Point, read_runs

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "results" / "fashion_mnist_reference.jsonl"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def start(name: str, first_step: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "event": "start", "name": name, "ranks": 2, "first_step": first_step, "time": 0.0, "parameters": 1000,
        "config": {"comm_fraction": 0.2}, "facts": {}, "bytes_are": "counted", "versions": {}, **more,
    }  # fmt: skip


def step(number: int, seconds: float, sent: float, loss: float | None = 1.0) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "seconds": seconds, "values": {"loss": loss}, "rounds": number,
        "reselections": 1, "resyncs": 0, "total_bytes_sent": sent, "total_bytes_received": sent,
        "dense_bytes": 3 * sent, "ratio": 1 / 3, "bytes_sent": {"core": sent / 2, "explorer": sent / 2},
        "activities": dict.fromkeys(ACTIVITIES, seconds / 10),
    }  # fmt: skip


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Two runs; one diverges."""
    slim = [step(10 * i, 2.0 * i, 1e6 * i, 1.0 / i) for i in range(1, 8)]
    dense = [step(10 * i, 1.0 * i, 3e6 * i, None if i > 5 else 1.0 / i) for i in range(1, 8)]
    return write(tmp_path / "run.jsonl", start("slim"), *slim, start('a <b> & "c"', config=None), *dense)


def test_a_run_is_read_as_it_was_written(file: str) -> None:
    slim, dense = read_runs([file])
    assert (slim.name, slim.ranks, slim.parameters, slim.counted) == ("slim", 2, 1000, True)
    assert [point.step for point in slim.points] == list(range(10, 80, 10))
    assert slim.last.bytes_sent == 7e6
    assert slim.last.dense_bytes == 21e6
    assert slim.points[0].values == {"loss": 1.0}
    assert dense.last.values == {}


def test_a_resumed_run_is_one_run(tmp_path: Path) -> None:
    """Counters and clock go on; what was learned after the checkpoint, and learned again, counts once."""
    path = write(
        tmp_path / "run.jsonl", start("a"), step(10, 5.0, 100.0), step(20, 10.0, 200.0), step(30, 15.0, 300.0),
        start("a", first_step=20), step(30, 6.0, 110.0), step(40, 11.0, 210.0),
    )  # fmt: skip
    (run,) = read_runs([path])
    assert [(point.step, point.seconds, point.bytes_sent) for point in run.points] == [
        (10, 5.0, 100.0), (20, 10.0, 200.0), (30, 16.0, 310.0), (40, 21.0, 410.0)
    ]  # fmt: skip
    assert run.last.activities["wait"] == pytest.approx(2.1)
    assert run.last.bytes_by_phase["core"] == 205.0


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, start("slim"), step(1, 1.0, 1.0)) for name in ("a.jsonl", "b.jsonl")]
    assert [run.name for run in read_runs(paths)] == ["slim, 2 ranks (1)", "slim, 2 ranks (2)"]


def test_the_examples_runs_are_read_too() -> None:
    runs = read_runs([str(EXAMPLE)])
    assert len(runs) == 12
    slim = runs[1]
    assert slim.counted
    assert slim.last.bytes_sent / slim.last.dense_bytes == pytest.approx(0.338, abs=1e-3)
    assert slim.last.bytes_by_phase["core"] > 0
    assert slim.points[3].values["test_loss"] < 1


def test_time_of_a_step_adds_up() -> None:
    """The parts are what was counted between two points, and together the clock."""
    begin = Point(10, 5.0, {}, 0.0, 0.0, {"wait": 1.0, "pack": 0.5})
    end = Point(30, 9.0, {}, 0.0, 0.0, {"wait": 2.0, "pack": 0.7, "merge": 0.4})
    parts = step_milliseconds(begin, end)
    assert parts["wait"] == pytest.approx(50)
    assert parts["pack"] == pytest.approx(10)
    assert parts["merge"] == pytest.approx(20)
    assert sum(parts.values()) == pytest.approx(200)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no run with a step"),
        ("{}\n", "holds no run with a step"),
        ('{"event": "start"}\n', "no run"),
        ("not JSON\n", "line 1 is not a run"),
        ("[1]\n", "line 1 is not a run but a list"),
        (json.dumps(step(1, 1.0, 1.0)), "holds lines that are no run"),
    ],
)
def test_files_that_hold_no_run(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    assert cli.main(["report", str(path)]) == cli.MISUSED
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--value", "speed"], "there are: loss"), (["--out", "x.pdf"], "does not end in .html")],
)
def test_options_that_make_no_sense(file: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", file, *more]) == cli.MISUSED
    assert said in capsys.readouterr().err


def test_pictures_instead_of_a_page(file: str, tmp_path: Path) -> None:
    assert cli.main(["report", file, "--png", str(tmp_path / "pictures")]) == cli.OK
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["loss.png", "time.png", "time_course.png", "traffic.png"]
    assert not (tmp_path / "run.html").exists()


class Page(HTMLParser):
    """What the page refers to, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.references += [str(values[name]) for name in ("src", "href") if name in values]
        if tag == "img":
            self.images.append(values)
        elif tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_by_itself(file: str, tmp_path: Path) -> None:
    """Nothing is fetched; every picture has a description, and axes with names and units."""
    assert cli.main(["report", file]) == cli.OK
    text = (tmp_path / "run.html").read_text()
    page = Page(text)
    assert page.open == []
    assert all(reference.startswith("data:") for reference in page.references)
    assert "<script" not in text
    assert "a &lt;b&gt; &amp;" in text
    assert len(page.images) == 4
    for image in page.images:
        assert image["alt"]
        drawing = base64.b64decode(str(image["src"]).partition("base64,")[2])
        ElementTree.fromstring(drawing)
        # matplotlib names the text that it draws as outlines in comments
        assert re.search(rb"<!-- .*\((MB|s|ms)\) -->", drawing)
        assert b'id="legend_1"' in drawing


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_without_errors(file: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    assert cli.main(["report", file]) == cli.OK
    page, shot = tmp_path / "run.html", tmp_path / "shot.png"
    text = page.read_text()
    # Loaded pictures have a size; what went wrong comes out on the console.
    check = "addEventListener('load', () => console.log('SIZES', ...[...document.images].map(i => i.naturalWidth)))"
    page.write_text(text.replace("</body>", f"<script>{check}</script></body>"))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--v=0", "--window-size=1100,2200",
         f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    (sizes,) = [line for line in console if "SIZES" in line]
    assert console == [sizes]
    assert [int(size) > 300 for size in re.findall(r"\d+", sizes.split("SIZES")[1].split('"')[0])] == [True] * 4
    assert shot.stat().st_size > 50_000


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "there is no file"), ("", "holds no runs"), ("half a li", "line 1 is not a run")],
    ids=("missing", "empty", "broken"),
)
def test_the_examples_report_says_what_is_wrong_with_a_file(content: str | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    script = EXAMPLE.parents[1] / "report.py"
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert text in done.stderr
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
