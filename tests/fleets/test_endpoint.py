"""What an endpoint makes of an engine's answers."""

import pytest

from dsi.fleets.endpoint import EndpointError, check_no_error


def test_error_amid_a_stream_is_told_in_the_engines_words() -> None:
    check_no_error("http://engine", {"choices": []})
    with pytest.raises(EndpointError, match=r"^http://engine: no target is left$"):
        check_no_error("http://engine", {"error": {"message": "no target\nis left", "code": 503}})
