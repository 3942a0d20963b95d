"""Real data for the examples, read whole into memory. Nothing here is downloaded."""

from __future__ import annotations

import dataclasses
import gzip
import os
import subprocess
import zlib
from pathlib import Path

import numpy as np
import torch

FASHION_MNIST_DIR = "/usr/share/datasets/fashion-mnist"  # Debian's dataset-fashion-mnist
TEXT_PROGRAM = "bible"  # Debian's bible-kjv, which reads bible-kjv-text
_REMEDY = "run `apt-get install --reinstall dataset-fashion-mnist`, or name the folder that has it with --data DIR"

_TEXT_REMEDY = "run `apt-get install bible-kjv bible-kjv-text`, or name a folder of your own .txt files with --data DIR"


class DataError(Exception):
    """Data that cannot be used; the message is one line that names the file and the remedy."""


def default_folder() -> str:
    """Where the data is unless the user says otherwise: HVD_SLIM_DATA, else the Debian package's folder."""
    return os.environ.get("HVD_SLIM_DATA") or FASHION_MNIST_DIR


@dataclasses.dataclass(frozen=True)
class Images:
    """Grey images and their classes.

    Attributes:
        images: uint8, shape (count, 28, 28).
        labels: int64, shape (count,), in [0, 10).
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return self.labels.numel()


def read_fashion_mnist(folder: str) -> tuple[Images, Images]:
    """Fashion-MNIST's training and test images from its four .gz files in ``folder``.

    Raises:
        DataError: a file is missing or damaged.
    """
    train, test = (_read_pair(Path(folder), prefix) for prefix in ("train", "t10k"))
    return train, test


def _read_pair(folder: Path, prefix: str) -> Images:
    image_file, label_file = folder / f"{prefix}-images-idx3-ubyte.gz", folder / f"{prefix}-labels-idx1-ubyte.gz"
    images, labels = _read_idx(image_file, 3), _read_idx(label_file, 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{image_file} holds images of {images.shape[1]}x{images.shape[2]}, not 28x28; {_REMEDY}")
    if len(labels) != len(images) or len(labels) == 0:
        raise DataError(f"{label_file} holds {len(labels)} labels for {len(images)} images; {_REMEDY}")
    if labels.max() > 9:
        raise DataError(f"{label_file} holds a label of {labels.max()}, above 9; {_REMEDY}")
    return Images(torch.from_numpy(images), torch.from_numpy(labels).long())


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """One idx file: a big-endian header (type 8 = unsigned byte, number of dimensions, each length), then the bytes."""
    try:
        with gzip.open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {_REMEDY}") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); {_REMEDY}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); {_REMEDY}") from None
    start = 4 + 4 * dimensions
    if len(data) < start or data[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path} is damaged (not an idx file of bytes in {dimensions} dimensions); {_REMEDY}")
    shape = np.frombuffer(data, ">u4", dimensions, offset=4).astype(np.int64)
    if len(data) - start != shape.prod():
        raise DataError(
            f"{path} is damaged ({len(data) - start} bytes where its header says {shape.prod()}); {_REMEDY}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(tuple(shape)).copy()


def default_text_folder() -> str | None:
    """Where HVD_SLIM_TEXT says; without it None, which is Debian's King James text."""
    return os.environ.get("HVD_SLIM_TEXT") or None


def read_text(folder: str | None) -> str:
    """The text of all .txt files in ``folder``, in the order of their names; without one, Debian's King James text.

    That one is 4.4 million characters, a verse a line, each after its place ("Ge1:1 In the beginning ...").

    Raises:
        DataError: the text is missing or cannot be read.
    """
    if folder is None:
        return _king_james_text()
    try:
        files = sorted(path for path in Path(folder).iterdir() if path.suffix == ".txt")
        text = "".join(path.read_text(encoding="utf-8") for path in files)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the text in {folder} cannot be read ({error}); {_TEXT_REMEDY}") from None
    if not text:
        raise DataError(f"{folder} holds no text in .txt files; {_TEXT_REMEDY}")
    return text


def _king_james_text() -> str:
    command = [TEXT_PROGRAM, "-f", "gen1:1-rev22:21"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise DataError(f"the program {TEXT_PROGRAM!r} is missing; {_TEXT_REMEDY}") from None
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError) as error:
        raise DataError(f"{' '.join(command)} failed ({error}); {_TEXT_REMEDY}") from None
    if len(done.stdout) < 1_000_000:
        raise DataError(f"{' '.join(command)} printed {len(done.stdout)} characters only; {_TEXT_REMEDY}")
    return done.stdout
