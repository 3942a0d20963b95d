"""What belongs to a model but is no parameter: BatchNorm's running statistics, above all."""

from __future__ import annotations

from typing import Any

import torch

from hvd_slim.agreement import require_equal
from hvd_slim.broadcasting import PHASE, describe, patient_transport, write


def average_buffers(model: torch.nn.Module, process_set: Any = None) -> None:
    """Replace every floating-point buffer of ``model`` by its mean over ranks, in one packed reduction. Collective.

    The policy: buffers are no parameters, nothing learns from them during training, and no round exchanges them.
    BatchNorm's running mean and variance describe what each rank's own batches looked like. Call this before
    evaluating, saving or comparing a model, usually together with ``optimizer.resync()``: the ranks then have equal
    buffers, which describe the batches of all. Whole numbers and bools (``num_batches_tracked``) are left alone: they
    count the rank's own batches. ``hvd.SyncBatchNorm`` (GPUs only) normalises by all ranks' batches in the first place;
    its buffers are equal anyway.

    Sums are taken in float64: buffers that are equal on all ranks, such as constants, keep their value (float64 ones to
    rounding).

    Args:
        model: the same on all ranks.
        process_set: the ranks that take part; None for all. A rank outside returns at once.

    Raises:
        RankMismatchError: on every rank, if the buffers' names, shapes or dtypes differ.
    """
    transport = patient_transport("average_buffers", process_set)
    if transport.size == 1:
        return
    named = [(name, b) for name, b in model.named_buffers() if b.is_floating_point() or b.is_complex()]
    require_equal(transport, [(f"buffer {name!r}", describe(tensor)) for name, tensor in named])
    if not named:
        return
    views = [torch.view_as_real(b.detach()) if b.is_complex() else b.detach() for _, b in named]
    packed = torch.cat([view.reshape(-1).to(views[0].device, torch.float64) for view in views])
    means = transport.allreduce(packed, PHASE).wait().div_(transport.size)
    for view, mean in zip(views, means.split([view.numel() for view in views])):
        write(view, mean.view(view.shape))
