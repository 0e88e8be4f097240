"""Addresses of endpoints."""

import pytest

from dsi.models.endpoints.address import EndpointAddress, is_address, parse_address, split_addresses


@pytest.mark.parametrize(
    ("text", "url", "kind"),
    [
        ("http://a:8000", "http://a:8000", None),
        ("https://a/", "https://a", None),
        ("vllm+http://a:8000/v1", "http://a:8000", "vllm"),
        ("llama.cpp+https://a/engine/", "https://a/engine", "llama.cpp"),
        ("dsi+http://[::1]:80", "http://[::1]:80", "dsi"),
    ],
)
def test_parse_address_finds_url_and_kind(text: str, url: str, kind: str | None) -> None:
    assert parse_address(text) == EndpointAddress(url, kind)


@pytest.mark.parametrize(
    "text", ["ftp://a", "magic+http://a", "http://", "http://a:x", "http://a:99999", "http://a?b=1", "http://u:p@a"]
)
def test_parse_address_refuses_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="endpoint '"):
        parse_address(text)


def test_split_addresses_leaves_local_models_alone() -> None:
    assert split_addresses("http://a, vllm+http://b") == ("http://a", "vllm+http://b")
    assert split_addresses("a,b") == ()
    assert not is_address("org/model")
