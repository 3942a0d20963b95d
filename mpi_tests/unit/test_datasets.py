"""What examples train on: refused with the file and the remedy if it cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import datasets  # noqa: E402
from models import GoogLeNetStyle, SmallCNN, SmallGPT, VggStyle  # noqa: E402


def test_text_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first ")
    (tmp_path / "c.md").write_text("no")
    assert datasets.read_text(str(tmp_path)) == "first second"


def test_text_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(datasets.DataError, match=r"no text in \.txt files.*--data DIR"):
        datasets.read_text(str(tmp_path))
    with pytest.raises(datasets.DataError, match=r"cannot be read.*--data DIR"):
        datasets.read_text(str(tmp_path / "none"))
    monkeypatch.setattr(datasets, "TEXT_PROGRAM", "no-such-program")
    with pytest.raises(datasets.DataError, match=r"'no-such-program' is missing; run `apt-get install"):
        datasets.read_text(None)
    monkeypatch.setattr(datasets, "TEXT_PROGRAM", "true")
    with pytest.raises(datasets.DataError, match="0 characters only"):
        datasets.read_text(None)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(SmallCNN(), 206_922), (VggStyle(), 17_100_138), (VggStyle(8), 1_075_746), (GoogLeNetStyle(2), 54_650)],
)
def test_networks_see_images(model: torch.nn.Module, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_a_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = SmallGPT(vocabulary=10, context=8, width=16, layers=2, heads=2)
    one = torch.randint(10, (1, 8))
    other = one.clone()
    other[0, 5:] = (one[0, 5:] + 1) % 10
    with torch.no_grad():
        assert torch.equal(model(one)[0, :5], model(other)[0, :5])
        assert not torch.allclose(model(one)[0, 5:], model(other)[0, 5:])
