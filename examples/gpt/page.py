"""demo-output/index.html: all results of the demo on one self-contained page."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
.pictures { display: grid; gap: 1rem }
figure { margin: 0 } figure img { width: 100%; background: white; border-radius: 4px }
figcaption, .note { color: gray; font-size: 0.9rem }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem } caption { text-align: left; font-weight: 600 }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid #8884; text-align: right }
th:first-child, td:first-child { text-align: left }
pre { background: #8882; padding: 1rem; border-radius: 4px; overflow-x: auto; font-size: 0.85rem }
.holds { color: #2a8a3e } .fails { color: #d33 }
"""
Table = tuple[str, list[str], list[list[str]]]  # caption, head, rows


def summary(report: dict[str, Any], decoded: dict[str, Any] | None) -> Table:
    """The whole demo in one table: the task, the backend or method, the figure, and ours relative to theirs."""
    rows: list[list[str]] = []
    times = report["communication"]["backends"]
    first = next(iter(times))
    for title, key in (
        ("a training step, forward and backward", "step_ms"),
        ("all_reduce of its gradients", "gradient_ms"),
    ):
        for name, time in times.items():
            ratio = "" if name == first else f"{first}: {time[key] / times[first][key]:.2f} times as fast"
            rows.append([title, name, f"{time[key]:.2f} ms", ratio])
    for name, way in (decoded or {}).get("ways", {}).items():
        eager = decoded["ways"]["eager"]["tokens_per_second"] if decoded else 0.0
        ratio = "" if name == "eager" else f"{way['tokens_per_second'] / eager:.2f} times as fast as eager"
        rows.append(["writing text, a byte at a time", name, f"{way['tokens_per_second']:,.0f} tokens/s", ratio])
    return "Summary", ["what", "by", "figure", ""], rows


def decoding(decoded: dict[str, Any]) -> Table:
    rows = [
        [name, f"{way['tokens_per_second']:,.0f}", f"{way['first_call_seconds']:.1f}", f"{way['as_eager']}"]
        for name, way in decoded["ways"].items()
    ]
    caption = f"Writing {decoded['tokens']} bytes with the trained model, {decoded['threads']} threads"
    return caption, ["", "tokens a second", "first call, s", "bytes like eager's"], rows


def html_of(table: Table) -> str:
    caption, head, rows = table
    out = [f"<table><caption>{escape(caption)}</caption><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr>"]
    for row in rows:
        out += ["<tr>", *(f"<td>{escape(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*out, "</table>\n"])


def picture(path: Path, caption: str) -> str:
    """Embeds the picture in the page. Returns nothing if the file does not exist."""
    if not path.is_file():
        return ""
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{escape(caption)}" src="data:image/{kind};base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def write(folder: Path) -> Path:
    """Writes the page from report.json, decode.json and the pictures of the folder."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    decoded = folder / "decode.json"
    found = json.loads(decoded.read_text(encoding="utf-8")) if decoded.is_file() else None
    verdicts = [(one["holds"], one["text"]) for one in report["verdicts"]]
    if found:
        verdicts.append((found["resident_as_single_launches"], "resident mode writes the text of single launches"))
    versions = report["versions"]
    out = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ark_torch: the demo</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>\n'
        "<h1>A small GPT, trained and decoded over ark</h1>\n"
        f'<p class="note">{report["ranks"]} ranks on {escape(report["device"])}, PyTorch {escape(versions["torch"])}, '
        f"Python {escape(versions['python'])}; {report['config']['steps']} steps. "
        "Figures of this run, on this machine.</p>\n",
        html_of(summary(report, found)),
        '<div class="pictures">',
        picture(folder / "loss.png", "Loss of the same training over each backend, and its all_reduce"),
        picture(folder / "schedule.svg", "One decoding step compiled by ark: what each worker did, and when"),
        "</div>\n<h2>What must hold</h2>\n<ul>",
    ]
    for holds, text in verdicts:
        mark = "holds" if holds else "fails"
        out.append(f'<li><b class="{mark}">{mark}</b> {escape(text)}</li>')
    out.append("</ul>\n")
    if found:
        out.append(html_of(decoding(found)))
        sample = (folder / "sample.txt").read_text(encoding="utf-8")
        out.append(f"<h2>What the model has written</h2>\n<pre>{escape(sample)}</pre>\n")
    out.append("</body></html>\n")
    path = folder / "index.html"
    path.write_text("".join(out), encoding="utf-8")
    return path
