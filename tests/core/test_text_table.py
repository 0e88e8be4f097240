"""Texts that grow from request to request."""

from dsi.core.text_table import TextTable


def test_text_table_gives_a_growing_text_one_origin() -> None:
    table = TextTable()
    first, longer = table.sequence((1, 2, 3), 2), table.sequence((1, 2, 3, 4), 2)
    assert tuple(longer) == (1, 2, 3, 4)
    assert longer.origin is first.origin
    assert longer.parent is first


def test_text_table_follows_a_text_whose_end_was_rejected() -> None:
    table = TextTable()
    rejected, other = table.sequence((1, 2, 3, 4, 5), 2), table.sequence((1, 2, 3, 9), 2)
    assert tuple(other) == (1, 2, 3, 9)
    assert other.common_prefix(rejected) == 3
    assert other.origin is rejected.origin
    assert tuple(table.sequence((1, 2), 2)) == (1, 2)
    assert tuple(table.sequence((1, 2, 3, 4, 5), 2)) == (1, 2, 3, 4, 5)


def test_text_table_keeps_texts_apart_by_prompt_and_key() -> None:
    table = TextTable()
    origins = {table.sequence((1, 2, 3), length, key).origin for length in (1, 2) for key in ("a", "b")}
    assert len(origins) == 4


def test_text_table_forgets_the_least_recently_used() -> None:
    table = TextTable(capacity=2)
    first, second = table.sequence((1,), 1), table.sequence((2,), 1)
    table.sequence((1, 5), 1)
    table.sequence((3,), 1)
    assert table.sequence((1, 5, 6), 1).origin is first.origin
    assert table.sequence((2, 5), 1).origin is not second.origin
