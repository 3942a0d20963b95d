"""Trains a large embedding table with Horovod, dense or with Slim-DP: which word follows the last few?

Nearly all parameters are one row a word, as a recommender has one an item: a step touches the few rows of its batch.
The text is Debian's King James Bible (``apt-get install bible-kjv bible-kjv-text``), or your own.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from common import Parser, on_every_rank, parse_run
from datasets import DataError, default_text_folder, read_text
from runlog import Metric
from torch import nn
from training import Training, agreed_model, warmup_then_cosine

import hvd_slim as hvd

EXAMPLES = """examples:
  horovodrun -np 2 python examples/embedding_lm.py --method dense
  horovodrun -np 2 python examples/embedding_lm.py --comm-fraction 0.1 --core-fraction 0.05 --explorer leader
  horovodrun -np 2 python examples/embedding_lm.py --data ~/books --width 128 --answers 5000
"""
BITS_PER_WORD = Metric("bits_per_word", "held-out text", " bits a word", "words")
HELD_OUT = 0.05  # the last part of the text
EVALUATED = 8192  # words of it, evenly spread
#: a word, not the place that begins a verse ("Ge1:1")
WORD = re.compile(r"(?<![^\s(])[^\W\d_]+(?!\w)")


def parse_arguments() -> tuple[argparse.Namespace, hvd.SlimConfig | None]:
    """The options, and the Slim-DP configuration if that is the method."""
    parser = Parser(description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--data", metavar="DIR", default=default_text_folder(), help="folder with .txt files")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=64, help="words to be foretold in a step on each rank")
    parser.add_argument("--context", type=int, default=4, help="words before it that the model sees")
    parser.add_argument("--width", type=int, default=64, help="of a word's row in the table")
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden layer")
    parser.add_argument("--answers", type=int, default=1000, help="most frequent words told apart; others are one")
    parser.add_argument("--lr", type=float, default=0.003, help="highest learning rate; a cosine takes it to 0")
    least_one = ("steps", "batch_size", "context", "width", "hidden", "answers")
    return parse_run(parser, *least_one, warmup_steps=50, explorer="shared")


def numbered_words(text: str) -> tuple[torch.Tensor, int]:
    """The text's words as numbers, the most frequent one 0: int64, shape (words,); and how many words there are."""
    words = [word.lower() for word in WORD.findall(text)]
    counts = Counter(words)
    order = sorted(counts, key=lambda word: (-counts[word], word))  # the same on every rank
    number = {word: i for i, word in enumerate(order)}
    return torch.tensor([number[word] for word in words], dtype=torch.int64), len(order)


class NextWord(nn.Module):
    """A table of words, the rows of the last words side by side, and one hidden layer.

    Input (batch, context) word numbers, output (batch, answers + 1); the last answer is any other word.
    """

    def __init__(self, vocabulary: int, context: int, width: int, hidden: int, answers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(context * width, hidden)
        self.out = nn.Linear(hidden, answers + 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.hidden(self.table(words).flatten(1))))


def questions(words: torch.Tensor, at: torch.Tensor, context: int, answers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The words before each place, shape (places, context), and the answer there, shape (places,)."""
    windows = words[at[:, None] + torch.arange(-context, 1)]
    return windows[:, :-1], windows[:, -1].clamp(max=answers)


def evaluate(model: nn.Module, optimizer: Any, words: torch.Tensor, args: argparse.Namespace) -> tuple[float, float]:
    """Mean loss and bits a word on held-out text, of the model that all ranks agree on. Collective."""
    places = torch.linspace(args.context, len(words) - 1, EVALUATED, dtype=torch.float64).long()
    inputs, answers = questions(words, places[hvd.rank() :: hvd.size()], args.context, args.answers)
    with agreed_model(model, optimizer):
        loss = F.cross_entropy(model(inputs), answers, reduction="sum").double()
    mean = hvd.allreduce(loss, op=hvd.Sum, name="evaluation").item() / EVALUATED
    return mean, mean / math.log(2)


def read_words(args: argparse.Namespace) -> tuple[torch.Tensor, int]:
    """The numbered words of the text that the options name.

    Raises:
        DataError: it is missing, cannot be read, or too short.
    """
    words, vocabulary = numbered_words(read_text(args.data))
    if len(words) * HELD_OUT < args.context + 2:
        raise DataError(f"the text has {len(words)} words, too few for a context of {args.context}; give more text")
    return words, vocabulary


def main() -> None:
    hvd.init()
    args, config = parse_arguments()
    torch.set_num_threads(args.threads)
    words, vocabulary = on_every_rank(lambda: read_words(args), DataError)
    kept = int(len(words) * (1 - HELD_OUT))
    train, test = words[:kept], words[kept:]

    torch.manual_seed(args.seed)
    model = NextWord(vocabulary, args.context, args.width, args.hidden, args.answers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=args.lr),
        named_parameters=model.named_parameters(),
        compression=config or hvd.Compression.none,
    )
    scheduler = warmup_then_cosine(optimizer, args.steps, args.warmup_steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    batch = hvd.size() * args.batch_size
    training = Training(
        args, model, optimizer, scheduler, args.steps, batch, BITS_PER_WORD,
        lambda: evaluate(model, optimizer, test, args),
    )  # fmt: skip
    while training.step < args.steps:
        # All ranks draw alike and take disjoint parts.
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + training.step)
        places = torch.randint(args.context, len(train), (batch,), generator=generator)
        inputs, answers = questions(train, places[hvd.rank() :: hvd.size()], args.context, args.answers)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), answers)
        loss.backward()
        optimizer.step()
        scheduler.step()
        training.after_step(loss)
    training.finish("embedding_lm", config)
    hvd.shutdown()


if __name__ == "__main__":
    main()
