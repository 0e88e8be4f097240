from dsi.paper.table1 import PUBLISHED, table1


def test_table1_equals_the_published_cells() -> None:
    cells = table1()
    assert len(cells) == 24
    assert [cell for cell in cells if not cell.equal] == []


def test_table1_comes_from_the_simulator() -> None:
    """Change what is published: ours stay, and no longer agree."""
    key = ("best", "dsi")
    saved, PUBLISHED[key] = PUBLISHED[key], (8, 26, 50, 59)
    try:
        assert [(cell.ours, cell.published) for cell in table1() if not cell.equal] == [(58, 59)]
    finally:
        PUBLISHED[key] = saved
