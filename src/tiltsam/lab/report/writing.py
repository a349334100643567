"""A table as HTML, Markdown and LaTeX; in each, text from a record is text and never markup."""

from __future__ import annotations

import re
from html import escape

from tiltsam.lab.palette import METHOD_COLORS
from tiltsam.lab.report.tables import Cell, Table

__all__ = ["html_table", "latex_table", "markdown_table", "method_class"]

LONG_WORD = 24  # letters; a longer one, such as a path, may be broken anywhere

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "λ": r"$\lambda$",
    "–": "--",
    "²": r"$^2$",
}


def html_table(table: Table) -> str:
    """The table with a button in each heading, which page.js makes sort."""
    heads = "".join(
        f'<th scope="col" aria-sort="none" class="{"number" if numeric else "text"}">'
        f'<button type="button">{escape(text)}</button></th>'
        for text, numeric in zip(table.headings, table.numeric, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(_html_cell(cell, n) for cell, n in zip(row, table.numeric, strict=True)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="card"><div class="scroll" tabindex="0" role="region" aria-label="{escape(table.name)}">'
        f'<table data-table="{escape(table.name)}">\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>'
        f'</div><p class="caption">{escape(table.caption)}</p></div>'
    )


def _html_cell(cell: Cell, numeric: bool) -> str:
    # The number behind the text, in full: sorting goes by it, and whoever parses the page has it.
    data = "" if cell.value is None else f' data-value="{cell.value!r}"'
    data += "" if cell.error is None else f' data-error="{cell.error!r}"'
    text = f"<b>{escape(cell.text)}</b>" if cell.best else escape(cell.text)
    kind = "number" if numeric else "text"
    if not numeric and any(len(word) > LONG_WORD for word in cell.text.split()):
        kind = "text long"
    return f'<td class="{kind}"{data}>{_dot(cell.method) if cell.method else ""}{text}</td>'


def _dot(method: str) -> str:
    """A dot in the method's colour."""
    kind = method_class(method)
    return f'<svg class="dot m-{kind}" viewBox="0 0 10 10" aria-hidden="true"><circle cx="5" cy="5" r="5"/></svg>'


def method_class(method: str) -> str:
    """The name of the method's colour on the page; ``other`` for what is no method of ours."""
    return method if method in METHOD_COLORS else "other"


def markdown_table(table: Table) -> str:
    """GitHub's Markdown, the best in bold."""
    rule = "|".join("--:" if numeric else ":--" for numeric in table.numeric)
    lines = ["| " + " | ".join(map(_markdown, table.headings)) + " |", f"|{rule}|"]
    for row in table.rows:
        cells = (f"**{_markdown(c.text)}**" if c.best else _markdown(c.text) for c in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _markdown(table.caption), ""])


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#&~])", r"\\\1", " ".join(text.split()))


def latex_table(table: Table) -> str:
    """A ``table`` with the rules of booktabs, the best in bold."""
    columns = "".join("r" if numeric else "l" for numeric in table.numeric)
    head = " & ".join(map(_latex, table.headings))
    rows = [
        " & ".join(rf"\textbf{{{_latex(c.text)}}}" if c.best else _latex(c.text) for c in row) + r" \\"
        for row in table.rows
    ]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(table.caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
