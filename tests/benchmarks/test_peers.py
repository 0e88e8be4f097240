import pytest

from peers import ROWS, Text, by_class, class_lines, equal_rounds, holds, of_the_fastest, verdict


def test_verdict_compares_auto_with_the_fastest_row_round_by_round() -> None:
    rates = {"auto": [100.0, 50.0, 30.0], "si 5": [101.0, 49.0, 30.0], "nonsi": [40.0, 45.0, 29.0]}
    assert verdict(rates) == ("si 5", 1.0)
    slower = {**rates, "dsi": [110.0, 50.0, 33.0]}
    rival, ratio = verdict(slower)
    assert rival == "dsi"
    assert ratio == pytest.approx(30 / 33)
    assert not holds(ratio)
    assert holds(0.971)


def test_of_the_fastest_is_within_a_round() -> None:
    assert of_the_fastest({"auto": [1.0, 4.0], "dsi": [2.0, 2.0]}) == {"auto": [0.5, 1.0], "dsi": [1.0, 0.5]}


def test_by_class_follows_the_order_of_the_rounds() -> None:
    texts = {"auto": [Text((i,), 1.0, 0.1) for i in range(6)]}
    split = by_class(texts, [("a", (1,)), ("b", (2,)), ("b", (3,))])
    assert {name: [text.tokens[0] for text in rows["auto"]] for name, rows in split.items()} == {
        "a": [0, 3],
        "b": [1, 2, 4, 5],
    }


def test_class_lines_say_how_auto_did() -> None:
    fast, slow = Text((1, 2, 3), 1.0, 0.25), Text((1, 2, 4), 2.0, 0.5)
    lines = list(class_lines("stories", {"auto": [slow], "dsi": [fast]}))
    assert lines[0] == "stories"
    assert " ".join(lines[1].split()).endswith("of the fastest auto over it dsi over it ms to first token")
    assert " ".join(lines[2].split()) == "auto 1.5 (1.5 to 1.5) 0.50 1.00 2.00 500.0 (500.0 to 500.0)"
    assert lines[4] == "auto is behind: 0.500 times as fast as dsi"
    assert equal_rounds({"auto": [slow, fast], "dsi": [fast, fast]}) == 1


def test_rows_have_ours_and_theirs() -> None:
    assert {"auto", "dsi", "nonsi", "si 5", "transformers plain", "transformers assisted"} <= set(ROWS)
