"""mkdocs' hook: pages that stand in the root become pages of the site, and links to the repository's files work there.

In the repository every link is relative to its file, so that it works in an editor and on a code host. In the site a
link to another page stays one, results of benchmarks are copied beside the pages, and any other file is linked on the
code host when mkdocs.yml names one (repo_url), or shown as plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
COPIED = "benchmarks/results/"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)")


def rewritten(markdown: str, folder: str, repo_url: str) -> str:
    """The text of a page whose file lies in `folder` of the repository ("" or "docs"), with the site's links."""

    def replace(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match.group(0)
        place = os.path.normpath(os.path.join(folder, path)).replace(os.sep, "/")
        if place in PAGES:
            new = PAGES[place]
        elif place == "README.md":
            new = "index.md"
        elif place.startswith("docs/"):
            new = place.removeprefix("docs/")
        elif place.startswith(COPIED) and (ROOT / place).is_file():
            new = place.removeprefix("benchmarks/")
        elif repo_url:
            new = f"{repo_url.rstrip('/')}/blob/main/{place}"
        else:
            return text
        return f"{mark}[{text}]({new}{hash_}{anchor})"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)  # code stays as it is
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        text = rewritten((ROOT / source).read_text(encoding="utf-8"), "", config.repo_url or "")
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / COPIED).iterdir()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri in PAGES.values():
        return markdown
    return rewritten(markdown, "docs", config.repo_url or "")
