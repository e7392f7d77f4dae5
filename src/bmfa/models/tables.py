"""Results that show themselves as a table: as text for `print`, and as HTML in a notebook."""

from collections.abc import Mapping, Sequence
from html import escape

# A title, the lines of the table with its head first, how many columns are aligned at the right, and the
# sentences below.
Parts = tuple[str, Sequence[Sequence[str]], int, Sequence[str]]


class Table:
    """Base class of results that are a table."""

    def parts(self) -> Parts:
        """Return what is shown."""
        raise NotImplementedError

    def __str__(self) -> str:
        title, lines, right, notes = self.parts()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        signs = ">" * right + "<" * (len(widths) - right)
        form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
        rows = (form.format(*line).rstrip() for line in lines)
        return "\n".join((*filter(None, (title,)), *rows, *notes))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        title, (head, *body), _, notes = self.parts()
        rows = [f"<tr><th>{'</th><th>'.join(map(escape, head))}</th></tr>"]
        rows += [f"<tr><td>{'</td><td>'.join(map(escape, line))}</td></tr>" for line in body]
        below = "".join(f"<p>{escape(note)}</p>" for note in filter(None, notes))
        return f"<table><caption>{escape(title)}</caption>{''.join(rows)}</table>{below}"


def by_reason(what: str, reasons: Mapping[int, str]) -> list[str]:
    """Return a line for each reason, with the indices that it is for."""
    return [
        f"{what} {', '.join(str(i) for i, one in reasons.items() if one == reason)}, {reason}"
        for reason in dict.fromkeys(reasons.values())
    ]
