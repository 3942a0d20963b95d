"""Trains a convolutional network on Fashion-MNIST with Horovod, dense or with Slim-DP.

The script is what a Horovod user writes; the lines that differ are the import, ``compression=`` and
``optimizer.global_parameters()`` around evaluation (``training.agreed_model``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import Parser, on_every_rank, parse_run
from datasets import DataError, Images, default_folder, read_fashion_mnist
from models import GoogLeNetStyle, SmallCNN, VggStyle
from runlog import ACCURACY
from torch import nn
from training import Training, agreed_model, warmup_then_cosine

import hvd_slim as hvd

EXAMPLES = """examples:
  horovodrun -np 2 python examples/fashion_mnist.py --method dense
  horovodrun -np 2 python examples/fashion_mnist.py --method slim
  horovodrun -np 2 python examples/fashion_mnist.py --model googlenet --lr 0.1 --warmup-steps 100 --checkpoint run1
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
    parser = Parser(description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--data", metavar="DIR", default=default_folder(), help="folder with the four .gz files")
    parser.add_argument("--model", choices=("cnn", "vgg", "googlenet"), default="cnn", help="network")
    parser.add_argument("--width", type=int, help="of vgg (default 8) and googlenet (2): see models.py")
    parser.add_argument(
        "--batch-norm", action=argparse.BooleanOptionalAction, help="of vgg (default: no) and googlenet (yes)"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of the run, instead of --epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step on each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate; a cosine takes it to 0")
    parser.add_argument("--momentum", type=float, default=0.9)
    args, config = parse_run(parser, "epochs", "steps", "batch_size", "width")
    if args.model == "cnn" and (args.width is not None or args.batch_norm is not None):
        parser.error("--width and --batch-norm are for --model vgg and googlenet")
    return args, config


def make_model(args: argparse.Namespace) -> nn.Module:
    """The network that the options name."""
    given = {name: value for name in ("width", "batch_norm") if (value := getattr(args, name)) is not None}
    if args.model == "vgg":
        return VggStyle(**{"width": 8, **given})
    return GoogLeNetStyle(**{"width": 2, **given}) if args.model == "googlenet" else SmallCNN()


def batches(
    train: Images, epoch: int, steps: int, args: argparse.Namespace, skip: int = 0
) -> Iterator[tuple[torch.Tensor, ...]]:
    """This rank's batches of one epoch but for the first ``skip``. All ranks shuffle alike and take disjoint parts of
    the same length."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
    order = torch.randperm(len(train), generator=generator)
    mine = order[hvd.rank() :: hvd.size()]
    for chosen in mine[skip * args.batch_size : steps * args.batch_size].split(args.batch_size):
        yield network_input(train.images[chosen]), train.labels[chosen]


def network_input(images: torch.Tensor) -> torch.Tensor:
    """Normalised float32 (batch, 1, 28, 28) from uint8 (batch, 28, 28)."""
    return images.unsqueeze(1).float().div_(255).sub_(MEAN).div_(DEVIATION)


def evaluate(model: nn.Module, optimizer: Any, test: Images) -> tuple[float, float]:
    """Mean test loss and accuracy (percent) of the agreed model, each rank on its share. Collective."""
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct, images
    images, labels = test.images[hvd.rank() :: hvd.size()], test.labels[hvd.rank() :: hvd.size()]
    with agreed_model(model, optimizer):
        for part, answers in zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH)):
            output = model(network_input(part))
            totals[0] += F.cross_entropy(output, answers, reduction="sum")
            totals[1] += (output.argmax(1) == answers).sum()
            totals[2] += len(answers)
    loss, correct, count = hvd.allreduce(totals, op=hvd.Sum, name="evaluation").tolist()
    return loss / count, 100 * correct / count


def main() -> None:
    hvd.init()
    args, config = parse_arguments()
    torch.set_num_threads(args.threads)
    train, test = on_every_rank(lambda: read_fashion_mnist(args.data), DataError)

    torch.manual_seed(args.seed)
    model = make_model(args)
    per_epoch = len(train) // (hvd.size() * args.batch_size)  # the same on every rank
    total = args.steps or args.epochs * per_epoch
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        named_parameters=model.named_parameters(),
        compression=config or hvd.Compression.none,
    )
    scheduler = warmup_then_cosine(optimizer, total, args.warmup_steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    training = Training(
        args, model, optimizer, scheduler, total, hvd.size() * args.batch_size, ACCURACY,
        lambda: evaluate(model, optimizer, test),
    )  # fmt: skip
    while training.step < total:
        epoch, done = divmod(training.step, per_epoch)
        steps = min(per_epoch, total - epoch * per_epoch)
        for images, labels in batches(train, epoch, steps, args, skip=done):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            training.after_step(loss)
    training.finish("fashion_mnist", config)
    hvd.shutdown()


if __name__ == "__main__":
    main()
