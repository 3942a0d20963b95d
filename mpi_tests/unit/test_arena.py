"""The flat index space: every element has one coordinate, whatever the layout, and nothing else is touched."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim.arena import Arena, LayoutError, Segment
from unit.layouts import LAYOUTS, elements, make, whole_storage

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
models = st.lists(st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(DTYPES)), min_size=1, max_size=6)

every_layout = pytest.mark.parametrize("layout", sorted(LAYOUTS))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arena_of(model: list[tuple[str, torch.dtype]]) -> tuple[Arena, list[tuple[str, torch.Tensor]]]:
    """An arena over parameters made to order, and the parameters."""
    named = [(f"{number}: {layout}", make(layout, dtype)) for number, (layout, dtype) in enumerate(model)]
    return Arena(named), named


@every_layout
@every_dtype
def test_every_element_has_one_coordinate(layout: str, dtype: torch.dtype) -> None:
    """Writing 0, 1, 2, … by coordinate puts each number on one element, and reads back in that order."""
    parameter = make(layout, dtype)
    segment = Segment("w", parameter, 100)
    count = segment.stop - segment.start
    assert count == parameter.numel() * (2 if dtype.is_complex else 1)
    numbers = torch.arange(count, dtype=dtype.to_real())
    segment.write_all(numbers)
    assert torch.equal(segment.read_all(), numbers)
    assert torch.equal(elements(parameter).sort().values, numbers)


@every_layout
@every_dtype
def test_what_is_not_the_parameters_is_left_alone(layout: str, dtype: torch.dtype) -> None:
    """Memory between and around the elements of a view belongs to somebody else."""
    parameter = make(layout, dtype)
    address, strides, everything = parameter.data_ptr(), parameter.stride(), whole_storage(parameter)
    mine = torch.zeros_like(everything, dtype=torch.bool)
    mine.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset()).fill_(True)
    before = everything.clone()
    segment = Segment("w", parameter, 0)
    segment.write_all(torch.full((segment.stop,), 123.0))
    assert torch.equal(everything[~mine], before[~mine])
    assert (torch.view_as_real(everything[mine]) if dtype.is_complex else everything[mine]).eq(123).all()
    assert (parameter.data_ptr(), parameter.stride()) == (address, strides)


@every_layout
@every_dtype
def test_single_coordinates_agree_with_the_whole(layout: str, dtype: torch.dtype) -> None:
    """Coordinate i, found by its address, is element i of ``read_all``, for both index widths."""
    segment = Segment("w", make(layout, dtype), 0)
    for index in (torch.int32, torch.int64):
        address = segment.addresses(torch.arange(segment.stop, dtype=index))
        assert torch.equal(segment.memory[address.long()], segment.read_all())


@every_layout
@every_dtype
def test_a_tensor_of_the_same_shape_flattens_in_the_same_order(layout: str, dtype: torch.dtype) -> None:
    """A gradient has strides of its own; coordinate i of it still belongs to coordinate i of the parameter."""
    parameter = make(layout, dtype)
    segment = Segment("w", parameter, 0)
    twice = parameter.detach() * 2
    reversed_strides = twice.movedim(0, -1).contiguous().movedim(-1, 0) if twice.dim() else twice
    for gradient in (twice, twice.contiguous(), reversed_strides, twice.clone(memory_format=torch.preserve_format)):
        assert torch.equal(segment.flatten(gradient), segment.read_all() * 2)


def test_conjugated_and_sparse_gradients_flatten() -> None:
    segment = Segment("z", torch.randn(3, 2, dtype=torch.complex64), 0)
    gradient = torch.randn(3, 2, dtype=torch.complex64)
    assert torch.equal(segment.flatten(gradient.conj()), torch.view_as_real(gradient.conj().resolve_conj()).flatten())
    rows = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), torch.ones(2, 4), (3, 4), check_invariants=True)
    assert torch.equal(Segment("e", torch.randn(3, 4), 0).flatten(rows), rows.to_dense().flatten())


# Many parameters together --------------------------------------------------------------------------------------------


@given(models)
def test_segments_tile_the_index_space(model: list[tuple[str, torch.dtype]]) -> None:
    """From 0 to n without gap or overlap, groups too; a group has one dtype; every parameter is there once."""
    arena, named = arena_of(model)
    at = 0
    for group in arena.groups:
        assert group.start == at
        for segment in group.segments:
            assert segment.start == at
            assert segment.real.dtype == group.dtype
            at = segment.stop
        assert group.stop == at
    assert arena.n == at == sum(p.numel() * (2 if p.is_complex() else 1) for _, p in named)
    assert Counter(segment.name for segment in arena.segments()) == Counter(name for name, _ in named)
    assert len({(group.device, group.dtype) for group in arena.groups}) == len(arena.groups)
    wide = any(parameter.dtype.to_real() == torch.float64 for _, parameter in named)
    assert arena.value_dtype == (torch.float64 if wide else torch.float32)


@given(models, st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_located_coordinates_are_the_given_ones(
    model: list[tuple[str, torch.dtype]], data: st.DataObject, index: torch.dtype
) -> None:
    """Any ascending set, cut along the segments: pieces tile it, and each address holds the right element."""
    arena, _ = arena_of(model)
    for segment in arena.segments():
        segment.write_all(torch.arange(segment.start, segment.stop) % 256)  # exact in every dtype
    chosen = sorted(data.draw(st.sets(st.integers(0, max(0, arena.n - 1)), max_size=arena.n))) if arena.n else []
    where = arena.locate(torch.tensor(chosen, dtype=index))
    assert where.count == len(chosen)
    at = 0
    for piece in where.pieces:
        assert piece.begin == at
        assert piece.end > piece.begin
        at = piece.end
        wanted = torch.tensor(chosen[piece.begin : piece.end])
        assert torch.equal(piece.in_group.long() + arena.groups[piece.group].start, wanted)
        assert torch.equal(piece.segment.memory[piece.address.long()].long(), wanted % 256)
    assert at == len(chosen)


def test_dtypes_form_groups_in_order_of_appearance() -> None:
    named = [("a", make("vector")), ("b", make("vector", torch.float64)), ("c", make("vector"))]
    arena = Arena(named)
    assert [segment.name for segment in arena.segments()] == ["a", "c", "b"]
    assert [group.dtype for group in arena.groups] == [torch.float32, torch.float64]


def test_no_parameters() -> None:
    arena = Arena([])
    assert arena.n == 0
    assert arena.locate(torch.empty(0, dtype=torch.int64)).count == 0
    assert arena.refresh()


# Large index spaces, on a device without memory ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**31 + 1, 2**40])
def test_coordinates_around_the_limit_of_four_bytes(n: int) -> None:
    """CASES 27."""
    from hvd_slim.chunks import index_dtype

    arena = Arena([("large", torch.empty(n - 3, device="meta")), ("small", torch.empty(3, device="meta"))])
    arena._stops = arena._stops.new_tensor([n - 3, n], device="cpu")  # the one thing that must have values
    coordinates = torch.tensor([0, n - 4, n - 3, n - 1], dtype=index_dtype(n))
    pieces = arena.locate(coordinates).pieces
    assert [(piece.segment.name, piece.begin, piece.end) for piece in pieces] == [("large", 0, 2), ("small", 2, 4)]


def test_addresses_beyond_four_bytes_of_few_coordinates() -> None:
    """Two columns of a matrix with very long rows: few coordinates, far apart."""
    segment = Segment("columns", torch.empty((3, 2**31), device="meta")[:, :2], 0)
    address = segment.addresses(torch.arange(6, dtype=torch.int32))
    assert address.tolist() == [0, 1, 2**31, 2**31 + 1, 2**32, 2**32 + 1]


# Refusals ------------------------------------------------------------------------------------------------------------


def test_an_expanded_tensor_is_refused() -> None:
    for expanded in (torch.randn(1, 4).expand(3, 4), torch.randn(()).expand(5), torch.randn(3, 1).expand(3, 4).t()):
        with pytest.raises(LayoutError, match=r"'tied\.scale' is an expanded .*\.clone\(\)"):
            Arena([("tied.scale", expanded)])


def test_overlapping_elements_are_refused() -> None:
    """Any two elements at one address, not only strides of zero."""
    with pytest.raises(LayoutError, match="'windows'"):
        Arena([("windows", torch.randn(6).unfold(0, 3, 1))])


def test_other_types_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"'counter' has dtype torch\.int64"):
        Arena([("counter", torch.zeros(3, dtype=torch.int64))])
    with pytest.raises(LayoutError, match=r"'table' has layout torch\.sparse_coo"):
        Arena([("table", torch.eye(3).to_sparse())])


# Memory that is exchanged under the parameter -------------------------------------------------------------------------


@every_layout
def test_exchanged_memory_is_followed(layout: str) -> None:
    """``parameter.data = …`` of the same layout: after ``refresh`` the new memory is read and written."""
    parameter = make(layout)
    arena = Arena([("w", parameter)])
    old = parameter.detach()
    old_values = old.clone()
    parameter.data = make(layout).detach()
    assert arena.refresh()
    (segment,) = arena.segments()
    assert torch.equal(segment.read_all(), segment.flatten(parameter.detach()))
    segment.write_all(torch.full((arena.n,), 5.0))
    assert parameter.detach().eq(5).all()
    assert torch.equal(old, old_values)


def test_memory_of_another_form_is_noticed() -> None:
    for other in (torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 3), torch.randn(3, 5)):
        parameter = make("contiguous")
        arena = Arena([("w", parameter)])
        parameter.data = other
        assert not arena.refresh()


def test_coordinates_keep_their_numbers_when_only_strides_change() -> None:
    parameter = make("contiguous")
    arena = Arena([("w", parameter)])
    before = parameter.detach().clone()
    parameter.data = torch.empty(4, 3).t().copy_(before)
    assert arena.refresh()
    assert arena.layout_version == 1
    (segment,) = arena.segments()
    assert torch.equal(segment.read_all(), before.reshape(-1))
    (piece,) = arena.locate(torch.tensor([1, 5, 11], dtype=torch.int32)).pieces
    assert torch.equal(segment.memory[piece.address.long()], before.reshape(-1)[[1, 5, 11]])


def test_every_exchange_is_noticed_at_once() -> None:
    """Also those behind the first that no longer fits."""
    named = [("a", make("contiguous")), ("b", make("contiguous"))]
    arena = Arena(named)
    named[0][1].data = torch.randn(2, 2)
    named[1][1].data = torch.full((3, 4), 7.0)
    assert not arena.refresh()
    assert list(arena.segments())[1].read_all().eq(7).all()


def test_what_ranks_compare() -> None:
    described = Arena([("conv", make("channels last")), ("scale", make("scalar", torch.bfloat16))]).describe()
    assert described == [
        ("parameter 'conv'", "shape 2x3x4x5, dtype float32, dimensions in memory order [0, 2, 3, 1]"),
        ("parameter 'scale'", "shape scalar, dtype bfloat16, dimensions in memory order []"),
    ]
