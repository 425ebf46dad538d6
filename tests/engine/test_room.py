"""Room: memory is used again when nothing sees it, and no more of it is held than was in use at once. Shelf: what stays
lies side by side."""

from __future__ import annotations

import pytest

from engine.ops.room import Room, Shelf


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_is_used_again_only_when_nothing_sees_it(keeps: bool) -> None:
    """A tensor's memory is free once the tensor and every view of it are gone, not before."""
    room = Room(keeps=keeps)
    first = room.empty(4, 8)
    view, place = first[1], first.data_ptr()
    assert place % 64 == 0
    del first

    second = room.empty(4, 8)
    assert second.data_ptr() != place
    del view

    assert room.empty(2, 8).data_ptr() == place


def test_ever_larger_steps_leave_nothing_behind() -> None:
    """A piece that is too small for what comes gives way to a larger one."""
    room = Room()
    for size in range(1000, 50_000, 1000):
        room.empty(size), room.empty(2 * size)

    assert sorted(len(piece) for piece in room._memory)[-1] <= 100_000
    assert len(room._memory) <= 2


def test_what_is_written_down_of_addresses_stays_true() -> None:
    """With `keeps`, a larger piece is another one."""
    room = Room(keeps=True)
    small = room.empty(10)
    place = small.data_ptr()
    del small

    large = room.empty(1000)

    assert large.data_ptr() != place
    assert room.empty(10).data_ptr() == place


def test_the_smallest_piece_that_fits_is_taken() -> None:
    """So that the large ones are there for large tensors."""
    room = Room()
    pieces = [room.empty(size) for size in (1000, 10, 100)]
    places = [piece.data_ptr() for piece in pieces]
    del pieces

    assert room.empty(50).data_ptr() == places[2]
    assert [room.empty(5).data_ptr(), room.empty(1000).data_ptr()] == places[1::-1]


def test_pieces_that_stay_share_an_array_and_no_byte() -> None:
    """Each begins with a line of the cache; one that is larger than an array has its own."""
    shelf = Shelf()
    sizes = [1, 64, 65, 1 << 20, 100, Shelf.CHUNK_BYTES + 1, 7]
    pieces = [shelf.empty(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece.fill_(number)

    assert [piece.nbytes for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))
    assert pieces[4].data_ptr() - pieces[0].data_ptr() < 2 << 20
