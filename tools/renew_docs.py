"""Renews what README.md and docs/*.md show of other sources, and checks that it is up to date.

    python tools/renew_docs.py            # writes
    python tools/renew_docs.py --check    # writes nothing; names what is out of date, exit code 1

Tables of benchmarks/results, environment variables and compiler options are never written by hand: a part stands
between <!-- NAME: begin --> and <!-- NAME: end -->, where benchmarks/doc_tables.py has a function NAME. A part may be a
single figure within a sentence; the same part may stand in several places. The one picture of the README is drawn from
the same files by tools/draw_overview.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

MARKERS = re.compile(r"<!-- ([\w.-]+): begin -->(.*?)<!-- \1: end -->", re.DOTALL)


def documents(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def renewed(text: str, parts: Mapping[str, str], where: str = "the text") -> str:
    """The text with all its parts as `parts` has them. ValueError names a part that is not known or not closed."""

    def replace(match: re.Match[str]) -> str:
        name, old = match.groups()
        if name not in parts:
            raise ValueError(f"{where} has a part {name!r}, and benchmarks/doc_tables.py has none of that name")
        new = parts[name]
        inside = f"\n{new.strip()}\n" if old.startswith("\n") else new.strip()
        return f"<!-- {name}: begin -->{inside}<!-- {name}: end -->"

    begun = len(re.findall(r"<!-- [\w.-]+: begin -->", text))
    if begun != len(MARKERS.findall(text)):
        raise ValueError(f"{where} has a part that begins and does not end")
    return MARKERS.sub(replace, text)


def names_in(text: str) -> set[str]:
    return {name for name, _ in MARKERS.findall(text)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when something is out of date")
    arguments = parser.parse_args(argv)
    import doc_tables  # reads benchmarks/results

    parts = doc_tables.Parts(ROOT / "benchmarks" / "results")
    old = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        try:
            new = renewed(text, parts, path.name)
        except ValueError as error:
            print(f"renew_docs: {error}", file=sys.stderr)
            return 2
        if new != text:
            old.append(path.relative_to(ROOT))
            if not arguments.check:
                path.write_text(new, encoding="utf-8")
    if old:
        print(f"{'out of date' if arguments.check else 'renewed'}: {', '.join(map(str, old))}")
    return 1 if old and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
