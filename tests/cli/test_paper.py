"""`dsi paper`."""

from command import document_here, dsi_here


def test_paper_table1_equals_the_published_one() -> None:
    table = document_here("paper", "table1")
    assert (table["equal"], len(table["cells"])) == (24, 24)
    assert "24 of 24 cells equal" in dsi_here("paper", "table1").stdout
