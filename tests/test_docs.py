"""What the pages for people name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench/README.md"]
NO_FILES = ("bench/NAME.py", "fissile/_services/")
"""A pattern, and what is only in a wheel."""
FOLDERS = "(?:bench|common|deploy|docs|fissile|protos|router|tests|worker)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_folders_exist(page):
    """A path is in backquotes and begins with a folder of ours."""
    paths = re.findall(rf"`({FOLDERS}/[\w./-]*)`", page.read_text())
    assert [path for path in paths if path not in NO_FILES and not (ROOT / path).exists()] == []
