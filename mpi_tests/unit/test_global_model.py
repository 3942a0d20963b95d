"""w̄ beside the live parameters: every operation against its one-line definition on plain vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim.arena import Arena, Coordinates
from hvd_slim.global_model import GlobalModel, OwnedSlice, slice_nbytes
from unit.layouts import LAYOUTS, make

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
models = st.lists(st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(FLOATS)), min_size=1, max_size=5)
seeds = st.integers(min_value=0, max_value=2**31)


def live(arena: Arena) -> torch.Tensor:
    """w_k as a vector of value dtype."""
    parts = [segment.read_all().to(arena.value_dtype, copy=True) for segment in arena.segments()]
    return torch.cat(parts)


def mean(model: GlobalModel) -> torch.Tensor:
    """w̄ as a vector of value dtype."""
    return torch.cat([flat.to(model.arena.value_dtype) for flat in model.flat])


def rest(model: GlobalModel) -> torch.Tensor:
    """What rounding kept back of w̄, as a vector of value dtype."""
    parts = [torch.zeros_like(flat) if kept is None else kept for flat, kept in zip(model.flat, model.rest)]
    return torch.cat([part.to(model.arena.value_dtype) for part in parts])


def rounded(arena: Arena, values: torch.Tensor) -> torch.Tensor:
    """``values`` as each parameter's own dtype can hold them."""
    parts = [values[g.start : g.stop].to(g.dtype).to(arena.value_dtype) for g in arena.groups]
    return torch.cat(parts)


class Case:
    """A model that has trained a little away from its w̄, a random set of coordinates and changes for them."""

    def __init__(self, model: list[tuple[str, torch.dtype]], seed: int) -> None:
        torch.manual_seed(seed)
        self.named = [(f"{number}", make(layout, dtype)) for number, (layout, dtype) in enumerate(model)]
        self.arena = Arena(self.named)
        self.model = GlobalModel(self.arena)
        for _, parameter in self.named:
            parameter.data.add_(torch.randn_like(parameter) * 0.01)
        n = self.arena.n
        self.index = torch.rand(n).lt(0.4).nonzero().squeeze(1)
        self.where: Coordinates = self.arena.locate(self.index)
        self.change = torch.randn(self.index.numel(), dtype=self.arena.value_dtype) * 0.01
        self.w, self.w_bar = live(self.arena), mean(self.model)

    def changed(self, vector: torch.Tensor) -> torch.Tensor:
        """``vector`` with the change added at the set."""
        return vector.index_add(0, self.index, self.change)

    def expect(self, w: torch.Tensor, w_bar: torch.Tensor) -> None:
        """Live parameters and w̄ are exactly these."""
        assert torch.equal(live(self.arena), w)
        assert torch.equal(mean(self.model), w_bar)


cases = st.builds(Case, models, seeds)


@given(cases)
def test_starts_as_a_copy_of_the_live_parameters(case: Case) -> None:
    case.model.copy_from_live()
    case.expect(case.w, case.w)
    for flat, group in zip(case.model.flat, case.arena.groups):
        assert (flat.dtype, flat.numel()) == (group.dtype, group.stop - group.start)


@given(cases)
def test_pending_update(case: Case) -> None:
    """u_k = w_k − w̄, at the set and everywhere, as the network's dtype can hold it; nothing changes."""
    out = torch.full((case.index.numel(),), float("nan"), dtype=case.arena.value_dtype)
    everywhere = torch.full((case.arena.n,), float("nan"), dtype=case.arena.value_dtype)
    assert torch.equal(case.model.pending_update(case.where, out), (case.w - case.w_bar)[case.index])
    assert torch.equal(case.model.pending_update_everywhere(everywhere), case.w - case.w_bar)
    case.expect(case.w, case.w_bar)


@given(cases)
def test_absorb(case: Case) -> None:
    """w̄ += change at the set; the live parameters stay."""
    case.model.absorb(case.where, case.change)
    case.expect(case.w, rounded(case.arena, case.changed(case.w_bar)))


@given(cases)
def test_absorb_everywhere(case: Case) -> None:
    change = torch.randn(case.arena.n, dtype=case.arena.value_dtype) * 0.01
    case.model.absorb_everywhere(change)
    case.expect(case.w, rounded(case.arena, case.w_bar + change))


@given(cases)
def test_settle(case: Case) -> None:
    """w_k = w̄ at the set, and nowhere else."""
    case.model.settle(case.where)
    case.expect(case.w.index_copy(0, case.index, case.w_bar[case.index]), case.w_bar)


@given(cases)
def test_settle_what_could_not_be_sent(case: Case) -> None:
    """w_k = w̄ + unsent, rounded once to the parameter's dtype; at the set, and everywhere."""
    case.model.settle(case.where, case.change)
    case.expect(rounded(case.arena, case.w.index_copy(0, case.index, case.w_bar[case.index] + case.change)), case.w_bar)
    unsent = torch.randn(case.arena.n, dtype=case.arena.value_dtype) * 0.01
    case.model.settle_everywhere(unsent)
    case.expect(rounded(case.arena, case.w_bar + unsent), case.w_bar)


@given(cases)
def test_replace(case: Case) -> None:
    """w̄ = values at the set; the live parameters stay."""
    case.model.replace(case.where, case.change)
    case.expect(case.w, rounded(case.arena, case.w_bar.index_copy(0, case.index, case.change)))


@given(cases)
def test_advance(case: Case) -> None:
    """w̄ += change at the set, u_k unchanged: w_k = w̄ + u_k, each rounded once to the parameter's dtype."""
    case.model.advance(case.where, case.change)
    w_bar = rounded(case.arena, case.changed(case.w_bar))
    w = case.w.index_copy(0, case.index, (w_bar + (case.w - case.w_bar))[case.index])
    case.expect(rounded(case.arena, w), w_bar)


@given(cases)
def test_advance_of_a_coordinate_that_has_not_moved_lands_on_the_global_model(case: Case) -> None:
    case.model.settle_everywhere()
    case.model.advance(case.where, case.change)
    assert torch.equal(live(case.arena), mean(case.model))


@given(cases)
def test_swap(case: Case) -> None:
    case.model.swap_with_live()
    case.expect(case.w_bar, case.w)
    case.model.swap_with_live()
    case.expect(case.w, case.w_bar)
    case.model.settle_everywhere()
    case.expect(case.w_bar, case.w_bar)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, 1e-45])
def test_swap_keeps_every_bit(value: float) -> None:
    parameter = make("columns of a wider matrix")
    model = GlobalModel(Arena([("w", parameter)]))
    parameter.data.fill_(value)
    bits = parameter.data.clone().view(torch.int32)
    model.swap_with_live()
    model.swap_with_live()
    assert torch.equal(parameter.data.clone().view(torch.int32), bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("change", ["absorb", "advance", "absorb_everywhere", "owned", "owned everywhere"])
def test_changes_too_small_for_the_dtype_add_up(change: str, dtype: torch.dtype) -> None:
    """256 changes by 1/32 of what the dtype can tell apart: w̄ moves by eight of it, and nothing becomes pending."""
    start, unit = torch.tensor([1.0, 3.0, -1.5, 260.0]), torch.tensor([1.0, 2.0, 1.0, 256.0]) * torch.finfo(dtype).eps
    parameter = start.to(dtype)
    model = GlobalModel(Arena([("w", parameter)]))
    owned = OwnedSlice(model, 0, 4)
    everywhere = torch.arange(4)
    where = model.arena.locate(everywhere)
    for _ in range(256):
        if change == "absorb":
            model.absorb(where, unit / 32)
            model.settle(where)
        elif change == "advance":
            model.advance(where, unit / 32)
        elif change == "absorb_everywhere":
            model.absorb_everywhere(unit / 32)
            model.settle_everywhere()
        elif change == "owned":
            owned.add(everywhere, unit / 32)
        else:
            owned.add_everywhere(unit / 32)
    moved = owned.flat[0] if change.startswith("owned") else model.flat[0]
    assert torch.equal(moved.float(), start + 8 * unit)
    if not change.startswith("owned"):
        assert torch.equal(model.flat[0], parameter)


def test_parameters_without_elements() -> None:
    model = GlobalModel(Arena([("a", make("empty")), ("b", make("empty matrix"))]))
    where = model.arena.locate(torch.empty(0, dtype=torch.int32))
    model.absorb(where, torch.empty(0))
    model.advance(where, torch.empty(0))
    model.settle(where)
    model.swap_with_live()
    assert model.pending_update_everywhere(torch.empty(0)).shape == (0,)


# Slices of w̄, each held by one rank -----------------------------------------------------------------------------------


@given(cases, st.integers(1, 5))
def test_slices_together_are_the_whole(case: Case, ranks: int) -> None:
    """Cut among the ranks, sent as bytes and put together again: the same w̄, and only views are written through."""
    bounds = [case.arena.n * rank // ranks for rank in range(ranks + 1)]
    whole = case.model.empty_like()
    for start, stop in zip(bounds, bounds[1:]):
        owned = OwnedSlice(case.model, start, stop)
        nbytes = slice_nbytes(case.arena, start, stop)
        assert nbytes == sum(tensor.nbytes for tensor in owned.tensors())
        raw = owned.to_bytes(nbytes + 5)
        assert not raw[nbytes:].any()
        OwnedSlice(whole, start, stop, share=True).from_bytes(raw)
    assert torch.equal(mean(whole), case.w_bar)
    assert torch.equal(rest(whole), rest(case.model))
    case.expect(case.w, case.w_bar)


@given(cases, st.integers(1, 5), st.data())
def test_a_slice_reads_and_adds_like_the_whole(case: Case, ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    start, stop = case.arena.n * rank // ranks, case.arena.n * (rank + 1) // ranks
    inside = (case.index >= start) & (case.index < stop)
    coordinates, change = case.index[inside], case.change[inside]
    owned = OwnedSlice(case.model, start, stop)
    expected = case.w_bar[coordinates]
    assert torch.equal(owned.read(coordinates).to(case.arena.value_dtype), expected)
    owned.add(coordinates, change)
    case.model.absorb(case.arena.locate(coordinates), change)
    assert torch.equal(owned.read(coordinates).to(case.arena.value_dtype), mean(case.model)[coordinates])
    owned = OwnedSlice(case.model, start, stop)
    case.model.absorb(case.where, case.change)
    owned.copy_from(case.model, case.where)
    everything = torch.arange(start, stop)
    assert torch.equal(owned.read(everything).to(case.arena.value_dtype), mean(case.model)[start:stop])
    more = torch.randn(stop - start, dtype=case.arena.value_dtype)
    owned.add_everywhere(more)
    case.model.absorb(case.arena.locate(everything), more)
    assert torch.equal(owned.read(everything).to(case.arena.value_dtype), mean(case.model)[start:stop])
