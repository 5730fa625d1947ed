"""What a host has left, within the limit of a container."""

from pathlib import Path

import pytest

from worker.runner import memory
from worker.runner.memory import available_host_memory


@pytest.mark.parametrize(("limit", "left"), [("1000", 700), ("500", 200), ("200", 0)])
def test_files_that_were_read_take_no_memory_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, left: int
) -> None:
    """A model that was just copied or read fills all of it."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 600\ninactive_file 500\nactive_file 100\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert available_host_memory() == left


def test_a_container_without_a_limit_has_what_the_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("inactive_file 500\nactive_file 100\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert available_host_memory() > 900
