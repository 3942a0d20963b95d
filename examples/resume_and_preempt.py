"""Trains as fashion_mnist.py does, on machines that may be taken away at any time.

SIGTERM or SIGUSR1 on any one rank is enough. At the next vote all ranks agree to stop, resync, save, and exit together
with status 75; started again, the same command goes on where it was. Status 0 is the end of the training.

The resumed run ends with the same bits as a run that never stopped and only resynced at that step
(``--resync-at STEP``): each rank saves its own replica and momentum. On another number of ranks, all go on from rank
0's, with a warning.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from checkpoints import Checkpoints
from common import Parser, add_slim_options, on_every_rank, require_at_least, slim_config, stop
from datasets import DataError, Images, default_folder, read_fashion_mnist
from fashion_mnist import batches, evaluate
from models import SmallCNN
from training import checksum

import hvd_slim as hvd

EXAMPLES = """examples:
  horovodrun -np 2 python examples/resume_and_preempt.py --folder run1
  kill -TERM PID                                     # of any rank; then the first command again

In a SLURM batch script (mpirun, too, hands SIGUSR1 on to its ranks; SIGTERM makes it end them):
  #SBATCH --requeue --signal=USR1@120
  srun --mpi=pmix python examples/resume_and_preempt.py --folder run1
  [ $? -eq 75 ] && scontrol requeue $SLURM_JOB_ID
"""
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Preemption:
    """Whether this rank was asked to stop, and, at a vote, whether any rank was."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # Nothing else here: the signal may come at any place, in the middle of a round too.
        self._asked = True

    def vote(self) -> bool:
        """Whether any rank was asked. Collective."""
        return bool(hvd.allreduce(torch.tensor(float(self._asked)), op=hvd.Sum, name="preemption") > 0)


def parse_arguments() -> tuple[argparse.Namespace, hvd.SlimConfig]:
    """The options, and the Slim-DP configuration."""
    parser = Parser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", default=default_folder(), help="folder with the four .gz files")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="where checkpoints are")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps-per-epoch", type=int, help="default: what the data give")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step on each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="first learning rate; a cosine takes it to 0")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0, help="of initial parameters and order of the data")
    parser.add_argument("--vote-every", type=int, default=10, help="steps between two votes on stopping")
    parser.add_argument("--resync-at", type=int, help="resync after this step, as a run that is stopped there does")
    add_slim_options(parser)
    args = parser.parse_args()
    require_at_least(parser, args, 1, "epochs", "batch_size", "vote_every")
    return args, slim_config(parser, args)


def say(text: str) -> None:
    """One line, by rank 0."""
    if hvd.rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def train(args: argparse.Namespace, config: hvd.SlimConfig, data: Images, test: Images) -> None:
    """To the end, or until the vote to stop. Collective."""
    torch.manual_seed(args.seed)
    model = SmallCNN()
    per_epoch = args.steps_per_epoch or len(data) // (hvd.size() * args.batch_size)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        named_parameters=model.named_parameters(),
        compression=config,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    preemption, checkpoints = Preemption(), Checkpoints(args.folder)
    first, done = 0, 0  # epoch, steps
    saved = on_every_rank(checkpoints.load, OSError)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["generator"])  # for models with dropout; this one draws nothing
        first = saved["epoch"]
        done = first * per_epoch + saved["images"] // (hvd.size() * args.batch_size)
        say(f"resumed after step {done}")
    say(f"training: process {os.getpid()} is rank 0")

    for epoch in range(first, args.epochs):
        for step, (images, labels) in enumerate(batches(data, epoch, per_epoch, args), epoch * per_epoch + 1):
            if step <= done:
                continue  # in the part of the epoch that is over
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if step == args.resync_at:
                optimizer.resync(model)
            if step % args.vote_every == 0 and preemption.vote():
                # Then rank 0's replica is everybody's, for a resume on another number of ranks.
                optimizer.resync(model)
                checkpoints.save(
                    step,
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(),
                        "generator": torch.get_rng_state(),
                        "epoch": epoch,
                        "images": (step - epoch * per_epoch) * hvd.size() * args.batch_size,
                    },
                )
                stop(f"stopped and saved after step {step}", PREEMPTED)
        scheduler.step()
        loss, accuracy = evaluate(model, optimizer, test)
        say(f"epoch {epoch + 1}: test loss {loss:.4f}, accuracy {accuracy:.2f} %")
    sums = " ".join(f"{value:08x}" for value in hvd.allgather_object(checksum(model)))
    say(f"finished; checksums of the ranks' parameters: {sums}")


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    args, config = parse_arguments()
    data, test = on_every_rank(lambda: read_fashion_mnist(args.data), DataError)
    train(args, config, data, test)
    hvd.shutdown()


if __name__ == "__main__":
    main()
