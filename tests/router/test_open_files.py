"""Connections within the limit of open files."""

import resource

import pytest

from router.open_files import affordable_connections


@pytest.mark.parametrize(
    ("wanted", "num_ports", "num_files", "held"),
    [
        (4096, 2, 1 << 20, 4096),
        (4096, 2, resource.RLIM_INFINITY, 4096),
        (4096, 1, 1024, 896),
        (4096, 2, 1024, 448),
        (100, 2, 1024, 100),
        (4096, 2, 96, 16),
        (4096, 2, 20, 1),
    ],
)
def test_ports_take_what_the_open_files_hold(wanted, num_ports, num_files, held, caplog):
    assert affordable_connections(wanted, num_ports, num_files) == held
    said = [record.getMessage() for record in caplog.records]
    expected = f"open files are limited to {num_files} (ulimit -Hn): a port takes {held} connections, not {wanted}"
    assert said == ([expected] if held < wanted else [])
