"""The networks that examples and benchmarks train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SmallCNN(nn.Sequential):
    """Two convolutions, two linear layers; 206,922 parameters. Input (batch, 1, 28, 28), output (batch, 10)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip


class VggStyle(nn.Sequential):
    """Pairs of 3x3 convolutions, then large linear layers, as in VGG; 17.1 million parameters.

    Input (batch, 1, 28, 28), output (batch, 10). More than nine tenths of the parameters are in two linear layers.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = [1, 32, 32, 64, 64, 128, 128]
        for number, (inputs, outputs) in enumerate(zip(channels, channels[1:])):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            if number % 2:
                layers.append(nn.MaxPool2d(2))
        super().__init__(
            *layers, nn.Flatten(),
            nn.Linear(128 * 3 * 3, 4096), nn.ReLU(), nn.Linear(4096, 2944), nn.ReLU(), nn.Linear(2944, 10),
        )  # fmt: skip


class SmallGPT(nn.Module):
    """A decoder-only transformer over characters; 3.2 million parameters by default.

    Args:
        vocabulary: number of characters.
        context: longest sequence.
        width, layers, heads: of the transformer.

    Input (batch, length) integers, output (batch, length, vocabulary).
    """

    def __init__(
        self, vocabulary: int = 96, context: int = 64, width: int = 256, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.size(1), device=characters.device)
        hidden = self.characters(characters) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class _Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised first and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        of_heads = self.query_key_value(self.first(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = of_heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed(self.second(hidden))
