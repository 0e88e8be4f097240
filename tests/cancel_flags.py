"""Cancel flags that several tests use."""

from dsi.models.protocol import Never


class CancelAfter(Never):
    """A flag that is set after it has been checked so many times."""

    def __init__(self, checks: int) -> None:
        self.checks_left = checks

    def is_set(self) -> bool:
        self.checks_left -= 1
        return self.checks_left < 0
