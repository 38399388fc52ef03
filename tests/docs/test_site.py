"""The documentation as a site: `mkdocs build --strict` accepts it, and fails on a broken link.

Needs requirements/docs.txt.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import start

ROOT = start.TESTS.parent
pytestmark = pytest.mark.changed("docs/*", "*.md", "mkdocs.yml", "tools/docs_site.py", "requirements/docs.txt")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("material", reason="pip install -r requirements/docs.txt")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)


def test_the_site_is_built(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    contributing = (tmp_path / "site" / "contributing.html").read_text(encoding="utf-8")
    assert 'href="pytorch-versions.html"' in contributing and "Adding a collective algorithm" in contributing
    performance = (tmp_path / "site" / "performance.html").read_text(encoding="utf-8")
    assert 'href="results/loop_step_h200.json.gz"' in performance
    assert (tmp_path / "site" / "results" / "loop_step_h200.json.gz").is_file()


@pytest.mark.parametrize("link", ["nowhere.md", "compile.md#no-such-heading"])
def test_a_broken_link_fails(link: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("site")
    for name in ("docs", "tools", "benchmarks/results"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, copy / name)
    page = copy / "docs" / "design.md"
    page.write_text(page.read_text(encoding="utf-8") + f"\n[broken]({link})\n", encoding="utf-8")
    done = build(copy, tmp_path / "site")
    assert done.returncode != 0 and link in done.stderr, done.stderr
