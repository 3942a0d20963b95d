"""What the study runs: tasks, and the methods that are compared on each."""

from __future__ import annotations

import dataclasses
import shlex


@dataclasses.dataclass(frozen=True)
class Row:
    """A method on a task.

    Attributes:
        label: in tables and charts.
        options: of the example's command line, beside the task's.
    """

    label: str
    options: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are compared with each other.

    Attributes:
        task: ranks, and the example with the options that all rows share.
        better: whether the metric rises (accuracy), or falls (bits).
        rows: the first is what the others are compared with.
    """

    title: str
    ranks: int
    task: str
    metric: str
    better: bool
    rows: tuple[Row, ...]

    def command(self, row: Row, seed: int) -> list[str]:
        """The example's command line, from the project's folder."""
        return [*shlex.split(f"{self.task} {row.options}"), "--seed", str(seed)]


def slim(comm: float, core: float, explorer: str, more: str = "") -> str:
    """Options of a setting; exchange is named, since "auto" would measure and might choose another path each time."""
    path = "allreduce" if explorer in ("shared", "leader") else "alltoall"
    return f"--comm-fraction {comm:g} --core-fraction {core:g} --explorer {explorer} --exchange {path} {more}".strip()


NO_CORE = 1e-6  # one coordinate
DENSE = Row("dense", "--method dense")
REFERENCE = Row("reference: random 0.3, core 0.15", slim(0.3, 0.15, "random"))
SHARED = Row("shared 0.3, core 0.15", slim(0.3, 0.15, "shared"))
FASHION = "examples/fashion_mnist.py"
FRONTIER = f"{FASHION} --epochs 2 --batch-size 16"

GROUPS = {
    "frontier": Group(
        "Small CNN, SGD, 8 ranks: accuracy against bytes", 8, FRONTIER, "test_accuracy", True,
        (
            DENSE,
            REFERENCE,
            Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader")),
            Row("leader 0.1, no core", slim(0.1, NO_CORE, "leader")),
            Row("leader 0.09, core 0.045", slim(0.09, 0.045, "leader")),
            Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader")),
            Row("leader 0.02, no core", slim(0.02, NO_CORE, "leader")),
            Row("leader 0.02, core 0.01, 8 local steps", slim(0.02, 0.01, "leader", "--local-steps 8")),
            Row("leader 0.02, no core, 8 local steps", slim(0.02, NO_CORE, "leader", "--local-steps 8")),
            Row("leader 0.058, core 0.029, int8", slim(0.058, 0.029, "leader", "--value-dtype int8")),
            Row("leader 0.049, no core, int8", slim(0.049, NO_CORE, "leader", "--value-dtype int8")),
            Row("leader 0.008, core 0.004, int8", slim(0.008, 0.004, "leader", "--value-dtype int8")),
            Row("leader 0.018, core 0.009, resync at the end", slim(0.018, 0.009, "leader", "--resync-every 936")),
            Row("leader 0.01, core 0.005, 8 local steps, resync at the end",
                slim(0.01, 0.005, "leader", "--local-steps 8 --resync-every 117")),
        ),
    ),
    "longer": Group(
        "Small CNN, SGD, 8 ranks: the same, three times as long", 8, f"{FASHION} --epochs 6 --batch-size 16",
        "test_accuracy", True,
        (
            DENSE,
            REFERENCE,
            Row("leader 0.09, core 0.045", slim(0.09, 0.045, "leader")),
            Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader")),
            Row("leader 0.058, core 0.029, int8", slim(0.058, 0.029, "leader", "--value-dtype int8")),
            Row("leader 0.049, no core, int8", slim(0.049, NO_CORE, "leader", "--value-dtype int8")),
            Row("leader 0.008, core 0.004, int8", slim(0.008, 0.004, "leader", "--value-dtype int8")),
            Row("leader 0.058, core 0.029, int8, 8 local steps",
                slim(0.058, 0.029, "leader", "--value-dtype int8 --local-steps 8")),
            Row("reference, local rate 0.125", slim(0.3, 0.15, "random", "--local-rate 0.125")),
            Row("leader 0.09, core 0.045, local rate 0.125", slim(0.09, 0.045, "leader", "--local-rate 0.125")),
            Row("leader 0.058, core 0.029, int8, local rate 0.35",
                slim(0.058, 0.029, "leader", "--value-dtype int8 --local-rate 0.35")),
            Row("leader 0.058, core 0.029, int8, local rate 0.125",
                slim(0.058, 0.029, "leader", "--value-dtype int8 --local-rate 0.125")),
            Row("leader 0.049, no core, int8, local rate 0.125",
                slim(0.049, NO_CORE, "leader", "--value-dtype int8 --local-rate 0.125")),
            Row("leader 0.028, core 0.014, int8, local rate 0.125",
                slim(0.028, 0.014, "leader", "--value-dtype int8 --local-rate 0.125")),
            Row("leader 0.008, core 0.004, int8, local rate 0.35",
                slim(0.008, 0.004, "leader", "--value-dtype int8 --local-rate 0.35")),
            Row("leader 0.008, core 0.004, int8, local rate 0.125",
                slim(0.008, 0.004, "leader", "--value-dtype int8 --local-rate 0.125")),
        ),
    ),
    "longest": Group(
        "Small CNN, SGD, 8 ranks: the same, six times as long", 8, f"{FASHION} --epochs 12 --batch-size 16",
        "test_accuracy", True,
        (
            DENSE,
            Row("leader 0.058, core 0.029, int8", slim(0.058, 0.029, "leader", "--value-dtype int8")),
            Row("leader 0.008, core 0.004, int8", slim(0.008, 0.004, "leader", "--value-dtype int8")),
        ),
    ),
    "overlap": Group(
        "Small CNN, SGD, 8 ranks: rounds one step late", 8, FRONTIER, "test_accuracy", True,
        (
            DENSE,
            Row("reference, overlap", slim(0.3, 0.15, "random", "--overlap")),
            Row("leader 0.02, core 0.01, overlap", slim(0.02, 0.01, "leader", "--overlap")),
        ),
    ),
    "ablations": Group(
        "Small CNN, SGD, 8 ranks: one choice at a time", 8, FRONTIER, "test_accuracy", True,
        (
            DENSE,
            Row("dense, int8 (Quant-DP)", "--exchange dense --value-dtype int8"),
            Row("random 0.1, core 0.05", slim(0.1, 0.05, "random")),
            Row("random 0.02, core 0.01", slim(0.02, 0.01, "random")),
            Row("random 0.02, no core", slim(0.02, NO_CORE, "random")),
            Row("cyclic 0.02, core 0.01", slim(0.02, 0.01, "cyclic")),
            Row("greedy 0.02, core 0.01", slim(0.02, 0.01, "greedy")),
            Row("greedy 0.005, no core", slim(0.005, NO_CORE, "greedy")),
            SHARED,
            Row("shared 0.1, core 0.05", slim(0.1, 0.05, "shared")),
            Row("shared 0.1, no core (as SPARTA)", slim(0.1, NO_CORE, "shared")),
            Row("shared 0.02, core 0.01", slim(0.02, 0.01, "shared")),
            Row("core 0.1 only", slim(0.1, 0.1, "shared")),
            Row("leader 0.05, core 0.025", slim(0.05, 0.025, "leader")),
            Row("leader 0.01, core 0.005", slim(0.01, 0.005, "leader")),
            Row("leader 0.02, int8", slim(0.02, 0.01, "leader", "--value-dtype int8")),
            Row("leader 0.02, |w| only", slim(0.02, 0.01, "leader", "--gradient-weight 0")),
            Row("leader 0.02, c = 0.3", slim(0.02, 0.01, "leader", "--gradient-weight 0.3")),
            Row("leader 0.02, c = 3", slim(0.02, 0.01, "leader", "--gradient-weight 3")),
            Row("leader 0.02, |g| only", slim(0.02, 0.01, "leader", "--gradient-weight 1e6")),
            Row("leader 0.02, q = 5", slim(0.02, 0.01, "leader", "--reselect-every 5")),
            Row("leader 0.02, q = 100", slim(0.02, 0.01, "leader", "--reselect-every 100")),
            Row("leader 0.02, resync 100", slim(0.02, 0.01, "leader", "--resync-every 100")),
            Row("leader 0.02, 4 local steps", slim(0.02, 0.01, "leader", "--local-steps 4")),
            Row("leader 0.02, 16 local steps", slim(0.02, 0.01, "leader", "--local-steps 16")),
        ),
    ),
    "vgg": Group(
        "VGG-style network, SGD, 4 ranks", 4, f"{FASHION} --model vgg --batch-norm --batch-size 32 --epochs 2",
        "test_accuracy", True,
        (DENSE, REFERENCE, SHARED, Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader"))),
    ),
    "googlenet": Group(
        "GoogLeNet-style network, SGD, 4 ranks", 4, f"{FASHION} --model googlenet --batch-size 32 --steps 600",
        "test_accuracy", True,
        (
            DENSE,
            REFERENCE,
            SHARED,
            Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader")),
            Row("reference, local rate 0.25", slim(0.3, 0.15, "random", "--local-rate 0.25")),
            Row("leader 0.02, core 0.01, local rate 0.25", slim(0.02, 0.01, "leader", "--local-rate 0.25")),
        ),
    ),
    "gpt": Group(
        "Small GPT, AdamW, 2 ranks", 2, "examples/char_gpt.py --steps 1000 --batch-size 16",
        "bits_per_character", False,
        (
            DENSE,
            REFERENCE,
            Row("reference, no restored norm", slim(0.3, 0.15, "random", "--restore-norm False")),
            SHARED,
            Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader")),
            Row("dense, half the learning rate", "--method dense --lr 0.003"),
            Row("dense, twice the learning rate", "--method dense --lr 0.012"),
            Row("reference, half the learning rate", slim(0.3, 0.15, "random", "--lr 0.003")),
            Row("reference, twice the learning rate", slim(0.3, 0.15, "random", "--lr 0.012")),
        ),
    ),
    "gpt-4-ranks": Group(
        "Small GPT, AdamW, 4 ranks", 4, "examples/char_gpt.py --steps 1000", "bits_per_character", False,
        (
            DENSE,
            REFERENCE,
            Row("reference, no restored norm", slim(0.3, 0.15, "random", "--restore-norm False")),
            SHARED,
            Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader")),
            Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader")),
            Row("reference, local rate 0.25", slim(0.3, 0.15, "random", "--local-rate 0.25")),
            Row("shared, local rate 0.25", slim(0.3, 0.15, "shared", "--local-rate 0.25")),
            Row("leader 0.1, core 0.05, local rate 0.25", slim(0.1, 0.05, "leader", "--local-rate 0.25")),
            Row("leader 0.02, core 0.01, local rate 0.25", slim(0.02, 0.01, "leader", "--local-rate 0.25")),
            Row("dense, twice the learning rate", "--method dense --lr 0.012"),
            Row("reference, twice the learning rate", slim(0.3, 0.15, "random", "--lr 0.012")),
            Row("shared, twice the learning rate", slim(0.3, 0.15, "shared", "--lr 0.012")),
        ),
    ),
    "embedding": Group(
        "A large embedding table, Adam, 2 ranks", 2, "examples/embedding_lm.py", "bits_per_word", False,
        (DENSE, REFERENCE, SHARED, Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader"))),
    ),
    "learning-rates": Group(
        "Dense at other learning rates: was it tuned with equal care?", 4, FASHION, "test_accuracy", True,
        tuple(
            Row(f"{model}, lr {rate:g}", f"{options} --method dense --lr {rate:g}")
            for model, options in (
                ("vgg", "--model vgg --batch-norm --batch-size 32 --epochs 2"),
                ("googlenet", "--model googlenet --batch-size 32 --steps 600"),
            )
            for rate in (0.02, 0.1)
        ),
    ),
    "small": Group(
        "A few steps of each method, for the tests", 2, f"{FASHION} --steps 20 --evals 2", "test_accuracy", True,
        (DENSE, Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader"))),
    ),
}  # fmt: skip
