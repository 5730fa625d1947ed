"""Addresses as people write them."""

import pytest

from fissile.address import router_target
from fissile.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("localhost", "localhost:50051"),
        ("localhost:7", "localhost:7"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("unix:/run/fissile.sock", "unix:/run/fissile.sock"),
        ("dns:///router:7", "dns:///router:7"),
    ],
)
def test_the_default_port_is_the_routers(address, target):
    assert router_target(address) == target


@pytest.mark.parametrize("address", ["", ":7", "host:", "host:port", "host:0", "host:65536", "http://host:7"])
def test_what_is_no_address_is_refused_by_name(address):
    with pytest.raises(InvalidArgumentError) as refused:
        router_target(address)
    assert [violation.field for violation in refused.value.violations] == ["address"]
