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
    """Pairs of 3x3 convolutions, then large linear layers, as in VGG.

    Args:
        width: channels of the first pair; everything else grows with it. 17.1 million parameters at 32, 1.1 million at
            8; more than nine tenths of them in two linear layers.
        batch_norm: normalise after each convolution.

    Input (batch, 1, 28, 28), output (batch, 10).
    """

    def __init__(self, width: int = 32, batch_norm: bool = False) -> None:
        layers: list[nn.Module] = []
        channels = [1, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        for number, (inputs, outputs) in enumerate(zip(channels, channels[1:])):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if batch_norm else [nn.ReLU()]
            if number % 2:
                layers.append(nn.MaxPool2d(2))
        large, small = 128 * width, 92 * width
        super().__init__(
            *layers, nn.Flatten(),
            nn.Linear(4 * width * 3 * 3, large), nn.ReLU(), nn.Linear(large, small), nn.ReLU(), nn.Linear(small, 10),
        )  # fmt: skip


class GoogLeNetStyle(nn.Sequential):
    """Inception modules in three stages, then a mean over places and one linear layer, as in GoogLeNet.

    Args:
        width: a sixteenth of the channels that the first module puts out (GoogLeNet: 16); the others in proportion.
        batch_norm: normalise after each convolution, as GoogLeNet's successor does.

    Input (batch, 1, 28, 28), output (batch, 10).
    """

    def __init__(self, width: int = 4, batch_norm: bool = True) -> None:
        w, norm = width, batch_norm
        super().__init__(
            *_convolution(1, 4 * w, 3, norm), nn.MaxPool2d(2),
            *_convolution(4 * w, 4 * w, 1, norm), *_convolution(4 * w, 12 * w, 3, norm),
            Inception(12 * w, 4 * w, (6 * w, 8 * w), (w, 2 * w), 2 * w, norm),
            Inception(16 * w, 8 * w, (8 * w, 12 * w), (2 * w, 6 * w), 4 * w, norm), nn.MaxPool2d(2),
            Inception(30 * w, 12 * w, (6 * w, 13 * w), (w, 3 * w), 4 * w, norm),
            Inception(32 * w, 16 * w, (10 * w, 20 * w), (2 * w, 8 * w), 8 * w, norm), nn.MaxPool2d(2),
            Inception(52 * w, 24 * w, (12 * w, 24 * w), (3 * w, 8 * w), 8 * w, norm),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64 * w, 10),
        )  # fmt: skip


class Inception(nn.Module):
    """Four branches over the same input, side by side in the output: 1x1; 1x1 and 3x3; 1x1 and 5x5; pool and 1x1.

    Args:
        inputs: channels that come in.
        one: channels of the 1x1 branch.
        three, five: channels of the 1x1 convolution that reduces, and of the one that follows.
        pooled: channels of the pooling branch.
    """

    def __init__(
        self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int, batch_norm: bool
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*layers)
            for layers in (
                _convolution(inputs, one, 1, batch_norm),
                _convolution(inputs, three[0], 1, batch_norm) + _convolution(*three, 3, batch_norm),
                _convolution(inputs, five[0], 1, batch_norm) + _convolution(*five, 5, batch_norm),
                [nn.MaxPool2d(3, stride=1, padding=1), *_convolution(inputs, pooled, 1, batch_norm)],
            )
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(images) for branch in self.branches], dim=1)


def _convolution(inputs: int, outputs: int, size: int, batch_norm: bool) -> list[nn.Module]:
    """A convolution that keeps height and width, its normalisation if there is one, and what makes it nonlinear."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=not batch_norm)]
    return layers + ([nn.BatchNorm2d(outputs)] if batch_norm else []) + [nn.ReLU()]


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
