"""Consistency of the documents: what is generated from results and declarations is up to date, and links work."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import start

ROOT = start.TESTS.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + PAGES
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
pytestmark = pytest.mark.quick


@pytest.fixture
def renew_docs(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # benchmarks set them; monkeypatch restores them
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import renew_docs

    yield renew_docs
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(ROOT / "benchmarks"), str(ROOT / "tools"))):
            del sys.modules[name]


def test_generated_parts_are_up_to_date(renew_docs, capsys: pytest.CaptureFixture[str]) -> None:
    assert renew_docs.main(["--check"]) == 0, f"{capsys.readouterr()}: run `python tools/renew_docs.py`"


def test_a_changed_figure_is_noticed_and_renewed(renew_docs) -> None:
    parts = {"one": "| 1 |\n", "fig": "2 us"}
    text = "a <!-- one: begin -->\nold\n<!-- one: end --> b <!-- fig: begin -->3 us<!-- fig: end --> c"
    new = renew_docs.renewed(text, parts)
    assert new == "a <!-- one: begin -->\n| 1 |\n<!-- one: end --> b <!-- fig: begin -->2 us<!-- fig: end --> c"
    assert renew_docs.renewed(new, parts) == new
    with pytest.raises(ValueError, match="has a part 'two', and"):
        renew_docs.renewed("<!-- two: begin --><!-- two: end -->", parts)
    with pytest.raises(ValueError, match="begins and does not end"):
        renew_docs.renewed("<!-- one: begin -->", parts)


def test_every_table_stands_in_a_document(renew_docs) -> None:
    import doc_tables

    shown = set().union(*(renew_docs.names_in(path.read_text(encoding="utf-8")) for path in renew_docs.documents()))
    assert set(doc_tables.TABLES) <= shown


def test_the_picture_has_the_figures_of_the_results(renew_docs) -> None:
    import doc_tables

    parts = doc_tables.Parts(ROOT / "benchmarks" / "results")
    picture = (ROOT / "docs" / "images" / "overview.svg").read_text(encoding="utf-8")
    for name in ("fig.decode-ark", "fig.decode-inductor", "fig.pair-ark", "fig.pair-inductor"):
        assert f">{parts[name].removesuffix(' ms')}<" in picture, f"{name}: run `python tools/draw_overview.py`"


def anchors(path: Path) -> set[str]:
    """Returns the anchors of a page's headings, as code hosts and mkdocs generate them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r" +", "-", re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).strip()) for title in titles}


def links(path: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text(encoding="utf-8")))
    return re.findall(r"\]\(([^()\s]+)\)", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if file == ROOT / "docs" / "contributing.md":  # a page of the site, generated from the root's
            file = ROOT / "CONTRIBUTING.md"
        assert file.exists(), f"{path.name} links to {link}, which is not there"
        assert file.is_relative_to(ROOT), f"{path.name} links to {link}, outside the repository"
        assert not anchor or anchor in anchors(file), f"{path.name} links to {link}: {file.name} has no such heading"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [path.name for path in PAGES if f": {path.name}\n" not in navigation] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_documents_is_python(path: Path) -> None:
    for language, code in FENCED.findall(path.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(code)


def test_variables_and_tools_that_documents_name_exist() -> None:
    from ark_torch import env

    known = {*env.names(), *env.BUILD, "ARK_TEST_BASE", "ARK_TEST_RANKS", "ARK_TEST_X"}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"\bARK_[A-Z_]+\b", text)) <= known, path.name
        for script in re.findall(r"python ((?:benchmarks|tools|examples)/[\w/]+\.py)", text):
            assert (ROOT / script).is_file(), f"{path.name} names {script}"
        for module in re.findall(r"python -m (ark_torch\.[\w.]+)", text):
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), f"{path.name}: {module}"
