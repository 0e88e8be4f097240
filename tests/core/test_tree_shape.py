"""The best draft tree of a size, how a drafter grows it, and how its growth is cut into forwards."""

from itertools import product
from math import prod

import pytest
from hypothesis import given, strategies as st

from dsi.core.tree_shape import END, best_paths, by_level, expansions, levels, num_accepted, num_grown, rank_chances

CHANCES = rank_chances(0.6, 0.5, 3)


def test_rank_chances_split_what_is_left() -> None:
    assert rank_chances(0.6, 0.5, 3) == pytest.approx((0.6, 0.2, 0.1))
    assert rank_chances(1.0, 0.5, 2) == (1.0, 0.0)


def test_best_paths_are_the_likeliest_of_all() -> None:
    every = [path for length in (1, 2, 3) for path in product(range(3), repeat=length)]
    likeliest = sorted((prod(CHANCES[rank] for rank in path) for path in every), reverse=True)[:9]
    assert [value for _, value in best_paths(CHANCES, 9, 3)] == pytest.approx(likeliest)


def test_best_paths_of_one_choice_are_a_chain() -> None:
    assert [path for path, _ in best_paths((0.8,), 3, 5)] == [(0,), (0, 0), (0, 0, 0)]
    assert num_accepted((0.8,), 3, 5) == pytest.approx(0.8 + 0.64 + 0.512)
    assert num_accepted((0.8,), 3, 2) == pytest.approx(0.8 + 0.64)


@given(st.integers(1, 40), st.integers(1, 6), st.sampled_from([CHANCES, (0.5, 0.5), (0.9, 0.05, 0.03, 0.01)]))
def test_expansions_grow_the_best_tree(size: int, depth: int, chances: tuple[float, ...]) -> None:
    paths: dict[int, tuple[int, ...]] = {END: ()}
    for node, count in expansions(chances, size, depth):
        for rank in range(count):
            paths[len(paths) - 1] = (*paths[node], rank)
    assert {path for path, _ in best_paths(chances, size, depth)} == set(paths.values()) - {()}


def test_by_level_needs_nothing_that_a_forward_has_not_returned() -> None:
    grown = expansions(CHANCES, 20, 5)
    known, forwards = 0, list(by_level(grown, 0))
    for forward in forwards:
        assert all(node < known for node, _ in forward)
        known += sum(count for _, count in forward)
    assert [len(forward) for forward in forwards] == levels(CHANCES, 20, 5)
    assert sum(forwards, ()) == grown
    assert num_grown(grown) == known
