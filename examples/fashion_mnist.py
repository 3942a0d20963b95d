"""Trains a small convolutional network on Fashion-MNIST with Horovod, dense or with Slim-DP.

The script is what a Horovod user writes; the lines that differ are the import, ``compression=`` and
``optimizer.global_parameters()`` around evaluation.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import Parser, add_run_options, add_slim_options, on_every_rank, require_at_least, slim_config
from datasets import DataError, Images, default_folder, read_fashion_mnist
from models import SmallCNN
from runlog import RunLog
from torch import nn

import hvd_slim as hvd

EXAMPLES = """examples:
  horovodrun -np 2 python examples/fashion_mnist.py --method dense
  horovodrun -np 2 python examples/fashion_mnist.py --method slim
  horovodrun -np 4 python examples/fashion_mnist.py --comm-fraction 0.2 --core-fraction 0.2 --resync-every 100
  python examples/fashion_mnist.py --epochs 1 --data ~/fashion-mnist       # one rank: nothing is sent
With more ranks than cores, let idle ranks give their core away:
  horovodrun -np 4 --mpi-args='--oversubscribe --mca mpi_yield_when_idle 1' python examples/fashion_mnist.py
Plain Horovod (--method dense) has no byte counter: its bytes are 2(K-1)/K * parameters * 4 a step, K ranks.
"""
MEAN, DEVIATION = 0.2860, 0.3530  # of the training pixels, scaled to [0, 1]
EVALUATION_BATCH = 500


def parse_arguments() -> tuple[argparse.Namespace, hvd.SlimConfig | None]:
    """The options, and the Slim-DP configuration if that is the method."""
    parser = Parser(description=__doc__, epilog=EXAMPLES, formatter_class=_HelpFormatter)
    parser.add_argument("--data", metavar="DIR", default=default_folder(), help="folder with the four .gz files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images a step on each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="first learning rate; a cosine takes it to 0")
    parser.add_argument("--momentum", type=float, default=0.9)
    add_run_options(parser)
    add_slim_options(parser)
    args = parser.parse_args()
    require_at_least(parser, args, 1, "epochs", "batch_size", "threads", "evals_per_epoch")
    require_at_least(parser, args, 0, "seed")
    config = slim_config(parser, args)
    return args, config if args.method == "slim" else None


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults and keeps the examples' lines."""


def batches(train: Images, epoch: int, steps: int, args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, ...]]:
    """This rank's batches of one epoch. All ranks shuffle alike and take disjoint parts of the same length."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
    order = torch.randperm(len(train), generator=generator)
    mine = order[hvd.rank() :: hvd.size()]
    for chosen in mine[: steps * args.batch_size].split(args.batch_size):
        yield network_input(train.images[chosen]), train.labels[chosen]


def network_input(images: torch.Tensor) -> torch.Tensor:
    """Normalised float32 (batch, 1, 28, 28) from uint8 (batch, 28, 28)."""
    return images.unsqueeze(1).float().div_(255).sub_(MEAN).div_(DEVIATION)


def evaluate(model: nn.Module, optimizer: Any, test: Images) -> tuple[float, float]:
    """Mean test loss and accuracy (percent) of the model that all ranks agree on, each rank on its share. Collective.

    Between resyncs the replicas drift apart; ``global_parameters`` puts the global model in their place.
    """
    agreed = optimizer.global_parameters() if hasattr(optimizer, "global_parameters") else contextlib.nullcontext()
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct, images
    images, labels = test.images[hvd.rank() :: hvd.size()], test.labels[hvd.rank() :: hvd.size()]
    model.eval()
    with agreed, torch.no_grad():
        for part, answers in zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH)):
            output = model(network_input(part))
            totals[0] += F.cross_entropy(output, answers, reduction="sum")
            totals[1] += (output.argmax(1) == answers).sum()
            totals[2] += len(answers)
    model.train()
    loss, correct, count = hvd.allreduce(totals, op=hvd.Sum, name="evaluation").tolist()
    return loss / count, 100 * correct / count


def main() -> None:
    hvd.init()
    args, config = parse_arguments()
    torch.set_num_threads(args.threads)
    train, test = on_every_rank(lambda: read_fashion_mnist(args.data), DataError)

    torch.manual_seed(args.seed)
    model = SmallCNN()
    steps = len(train) // (hvd.size() * args.batch_size)  # an epoch, the same on every rank
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        named_parameters=model.named_parameters(),
        compression=config or hvd.Compression.none,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    log = RunLog(args, optimizer, model, hvd.size() * args.batch_size, args.epochs * steps)
    log.evaluated(0.0, *evaluate(model, optimizer, test))
    evaluate_at = {steps * (i + 1) // args.evals_per_epoch for i in range(args.evals_per_epoch)}
    for epoch in range(args.epochs):
        log.start_clock()
        for step, (images, labels) in enumerate(batches(train, epoch, steps, args), 1):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()
            log.advance()
            if step in evaluate_at:
                log.stop_clock()
                log.evaluated(epoch + step / steps, *evaluate(model, optimizer, test))
                log.start_clock()
        log.stop_clock()
    log.finish("fashion_mnist", config)
    hvd.shutdown()


if __name__ == "__main__":
    main()
