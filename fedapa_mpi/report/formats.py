"""Writes tables: for the terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as Grid


@dataclass(frozen=True)
class Table:
    """A caption, column titles and cells; ``left`` columns on the left are text."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


def terminal(tables: Sequence[Table]) -> str:
    """Aligned by spaces; captions are broken at 160 characters, rows are not."""
    out = io.StringIO()
    for table in tables:
        cells = zip(*(map(len, row) for row in (table.columns, *table.rows)))
        width = max(160, sum(max(column) + 2 for column in cells))
        console = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
        grid = Grid(title=table.caption, title_justify="left", box=None, title_style="")
        for k, column in enumerate(table.columns):
            grid.add_column(column, justify="left" if k < table.left else "right", no_wrap=True)
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid)
        console.print()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def markdown(tables: Sequence[Table]) -> str:
    """Pipe tables."""
    parts = []
    for table in tables:
        rule = ["---"] * table.left + ["---:"] * (len(table.columns) - table.left)
        rows = [[cell.replace("|", r"\|") for cell in row] for row in table.rows]
        lines = [table.columns, rule, *rows]
        parts.append("\n".join([table.caption, "", *("| " + " | ".join(r) + " |" for r in lines)]))
    return "\n\n".join(parts)


def latex(tables: Sequence[Table]) -> str:
    """``table`` environments with booktabs rules."""
    parts = []
    for table in tables:
        align = "l" * table.left + "r" * (len(table.columns) - table.left)
        body = [" & ".join(map(_escaped, row)) + r" \\" for row in table.rows]
        parts.append(
            "\n".join(
                [
                    r"\begin{table}",
                    rf"\caption{{{_escaped(table.caption)}}}",
                    rf"\begin{{tabular}}{{{align}}}",
                    r"\toprule",
                    " & ".join(map(_escaped, table.columns)) + r" \\",
                    r"\midrule",
                    *body,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts)


def comma_separated(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """CSV with full precision, one header line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def number(mean: float, std: float, digits: int = 4) -> str:
    """``0.9791 ± 0.0031``; without ± for a single seed, ``-`` if there is nothing."""
    if math.isnan(mean):
        return "-"
    spread = "" if math.isnan(std) else f" ± {std:,.{digits}f}"
    return f"{mean:,.{digits}f}{spread}"


def _escaped(text: str) -> str:
    words = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum"}
    signs = {sign: rf"\text{word}{{}}" for sign, word in words.items()}
    signs |= {sign: "\\" + sign for sign in "&%$#_{}"} | {"±": r"$\pm$"}
    return "".join(signs.get(sign, sign) for sign in text)
