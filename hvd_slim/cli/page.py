"""The report as one HTML page that needs nothing else: no script, no font, no file beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from hvd_slim.cli.run_charts import Chart

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p.about, figcaption { color: #555; }
p.about { margin: 0 0 1.4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid #999; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: .9rem; margin-top: .3rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .92rem; }
dt { font-weight: 600; }
dd { margin: 0; }
footer { margin-top: 2.6rem; color: #555; font-size: .85rem; }
@media print { main { max-width: none; } section { break-inside: avoid; } }
"""


def page(
    title: str, about: str, header: Sequence[str], rows: Sequence[Sequence[str]], charts: Sequence[Chart],
    facts: Sequence[tuple[str, str]], footer: str,
) -> str:  # fmt: skip
    """The page's text: a table, the charts, and what is known of the runs as (name, text) pairs."""
    sections = [
        f"<section><h2>{escape(chart.title)}</h2>\n"
        f"<figure><img alt={_quoted(chart.title)} src={_quoted(_image(chart))}>"
        f"<figcaption>{escape(chart.caption)}</figcaption></figure></section>"
        for chart in charts
    ]
    known = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return "\n".join((
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body><main>",
        f'<h1>{escape(title)}</h1>\n<p class="about">{escape(about)}</p>',
        f'<div class="scroll"><table><thead>{_row("th", header)}</thead><tbody>',
        *(_row("td", row) for row in rows),
        "</tbody></table></div>",
        *sections,
        f"<section><h2>Settings</h2><dl>{known}</dl></section>",
        f"<footer>{escape(footer)}</footer>\n</main></body></html>\n",
    ))  # fmt: skip


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _quoted(text: str) -> str:
    return f'"{escape(text)}"'


def _image(chart: Chart) -> str:
    drawn = io.BytesIO()
    chart.draw(drawn, "svg")
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()
