"""Parameters of every memory layout that a model may have, each made inside a storage that can be watched."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: by name, the tensor's view of a fresh storage of random numbers; ``like(shape)`` gives a contiguous tensor
LAYOUTS: dict[str, Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = {
    "contiguous": lambda like: like(3, 4),
    "vector": lambda like: like(7),
    "scalar": lambda like: like(),
    "empty": lambda like: like(0),
    "empty matrix": lambda like: like(3, 0, 2),
    "transposed": lambda like: like(4, 3).t(),
    "permuted": lambda like: like(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda like: like(2, 4, 5, 3).permute(0, 3, 1, 2),
    "one channel, channels last": lambda like: like(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "part of a vector": lambda like: like(20)[3:11],
    "every other": lambda like: like(15)[::2],
    "columns of a wider matrix": lambda like: like(5, 7)[:, 2:5],
    "rows of a taller matrix": lambda like: like(7, 3)[2:5],
    "every other row and column": lambda like: like(6, 8)[::2, 1::2],
    "one column": lambda like: like(5, 7)[:, 3:4],
    "one element of a matrix": lambda like: like(5, 7)[2, 3],
    "columns, transposed": lambda like: like(5, 7)[:, 2:5].t(),
    "gapped in the middle": lambda like: like(2, 3, 4)[:, :2],
    "row of ones": lambda like: like(1, 5, 1),
}


def make(layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of that layout and dtype with random values."""
    tensor = LAYOUTS[layout](lambda *shape: torch.randn(shape, dtype=dtype))
    tensor.requires_grad_()
    return tensor


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Everything that lies in the tensor's storage, as a vector: a view."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's values as real numbers, shape (numel,) or (2·numel,), in the order of its indices."""
    data = tensor.detach()
    return (torch.view_as_real(data) if data.is_complex() else data).clone().reshape(-1)
