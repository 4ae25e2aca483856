"""The grid of an error message: the actions of the ranks near the error, with positions marked."""

from __future__ import annotations

NEIGHBOURS = 3  # ranks shown before and after a mark
CELLS = 6  # actions shown before and after a mark


def order_grid(cells: list[list[str]], marks: dict[int, int]) -> str:
    """One line per rank with its actions in order and the marked one in brackets; only what is near a mark.

    `marks` maps a rank to the position of an action; -1, or the length of the line, marks the end of the line.
    """
    near = {neighbour for rank in marks for neighbour in range(rank - NEIGHBOURS, rank + NEIGHBOURS + 1)}
    default = next(iter(marks.values()))
    lines = []
    for rank, row in enumerate(cells):
        if rank not in near:
            continue
        place = marks.get(rank)
        middle = len(row) if place == -1 else default if place is None else place
        shown = [f"[{cell}]" if position == place else cell for position, cell in enumerate(row)]
        if place in (-1, len(row)):
            shown.append("[end]")
        begin, end = max(0, middle - CELLS), middle + CELLS + 1
        piece = ["…"] * (begin > 0) + shown[begin:end] + ["…"] * (end < len(shown))
        lines.append(f"{' ' if place is None else '>'} rank {rank}  {' '.join(piece)}")
    return "\n".join(lines)
