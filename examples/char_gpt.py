"""Trains a small GPT on the characters of a text with Horovod and AdamW, dense or with Slim-DP.

The text is Debian's King James Bible (``apt-get install bible-kjv bible-kjv-text``), or your own.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from common import Parser, on_every_rank, parse_run, stop
from datasets import DataError, default_text_folder, read_text
from models import SmallGPT
from runlog import BITS_PER_CHARACTER
from torch import nn
from training import Training, agreed_model, warmup_then_cosine

import hvd_slim as hvd

EXAMPLES = """examples:
  horovodrun -np 2 python examples/char_gpt.py --method dense
  horovodrun -np 2 python examples/char_gpt.py --comm-fraction 0.1 --core-fraction 0.05 --explorer leader
  horovodrun -np 2 python examples/char_gpt.py --data ~/books --steps 5000 --checkpoint run1
"""
HELD_OUT = 0.05  # the last part of the text
EVALUATED = 1024  # sequences of it, evenly spread
EVALUATION_BATCH = 64


def parse_arguments() -> tuple[argparse.Namespace, hvd.SlimConfig | None]:
    """The options, and the Slim-DP configuration if that is the method."""
    parser = Parser(description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--data", metavar="DIR", default=default_text_folder(), help="folder with .txt files")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step on each rank")
    parser.add_argument("--context", type=int, default=64, help="characters in a sequence")
    parser.add_argument("--width", type=int, default=96, help="of the transformer, a multiple of --heads")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.006, help="highest learning rate; a cosine takes it to 0")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    least_one = ("steps", "batch_size", "context", "width", "layers", "heads")
    args, config = parse_run(parser, *least_one, warmup_steps=100, explorer="shared")
    if args.width % args.heads:
        parser.error(f"argument --width: {args.width} is not a multiple of --heads {args.heads}")
    return args, config


def encoded(text: str) -> tuple[torch.Tensor, int]:
    """The text as numbers of its characters, shape (length,), int64, and how many characters there are."""
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), len(characters)


def sequences(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and answers, the next characters: shape (starts, length) each."""
    windows = text[starts[:, None] + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


def evaluate(model: nn.Module, optimizer: Any, text: torch.Tensor, length: int) -> tuple[float, float]:
    """Mean loss and bits a character on held-out text, of the model that all ranks agree on. Collective."""
    starts = torch.linspace(0, len(text) - length - 1, EVALUATED).long()[hvd.rank() :: hvd.size()]
    totals = torch.zeros(2, dtype=torch.float64)  # loss, characters
    with agreed_model(model, optimizer):
        for part in starts.split(EVALUATION_BATCH):
            inputs, answers = sequences(text, part, length)
            totals[0] += F.cross_entropy(model(inputs).flatten(0, 1), answers.flatten(), reduction="sum")
            totals[1] += answers.numel()
    loss, count = hvd.allreduce(totals, op=hvd.Sum, name="evaluation").tolist()
    return loss / count, loss / count / math.log(2)


def main() -> None:
    hvd.init()
    args, config = parse_arguments()
    torch.set_num_threads(args.threads)
    text, vocabulary = encoded(on_every_rank(lambda: read_text(args.data), DataError))
    kept = int(len(text) * (1 - HELD_OUT))
    train, test = text[:kept], text[kept:]
    if len(test) <= args.context:
        stop(f"error: the text has {len(text)} characters, too few for sequences of {args.context}; give more", 2)

    torch.manual_seed(args.seed)
    model = SmallGPT(vocabulary, args.context, args.width, args.layers, args.heads)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay),
        named_parameters=model.named_parameters(),
        compression=config or hvd.Compression.none,
    )
    scheduler = warmup_then_cosine(optimizer, args.steps, args.warmup_steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    training = Training(
        args, model, optimizer, scheduler, args.steps, hvd.size() * args.batch_size, BITS_PER_CHARACTER,
        lambda: evaluate(model, optimizer, test, args.context),
    )  # fmt: skip
    while training.step < args.steps:
        # All ranks draw alike and take disjoint parts.
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + training.step)
        starts = torch.randint(len(train) - args.context, (hvd.size() * args.batch_size,), generator=generator)
        inputs, answers = sequences(train, starts[hvd.rank() :: hvd.size()], args.context)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), answers.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        training.after_step(loss)
    training.finish("char_gpt", config)
    hvd.shutdown()


if __name__ == "__main__":
    main()
