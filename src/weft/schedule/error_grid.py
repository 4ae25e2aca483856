"""A schedule as a plain grid in the order of work, with places marked: what an error shows."""

from __future__ import annotations

NEIGHBOURS = 3  # ranks shown on both sides of a mark
CELLS = 6  # actions shown on both sides of a mark


def order_grid(cells: list[list[str]], marks: dict[int, int]) -> str:
    """One line a rank, its actions in order, the marked one in brackets; only what is near a mark.

    `marks` maps a rank to the place of one of its actions; -1, or one too many, is the end of its line.
    """
    near = {other for rank in marks for other in range(rank - NEIGHBOURS, rank + NEIGHBOURS + 1)}
    usual = next(iter(marks.values()))
    lines = []
    for rank, row in enumerate(cells):
        if rank not in near:
            continue
        place = marks.get(rank)
        middle = len(row) if place == -1 else usual if place is None else place
        shown = [f"[{cell}]" if at == place else cell for at, cell in enumerate(row)]
        if place in (-1, len(row)):
            shown.append("[end]")
        begin, end = max(0, middle - CELLS), middle + CELLS + 1
        piece = ["…"] * (begin > 0) + shown[begin:end] + ["…"] * (end < len(shown))
        lines.append(f"{' ' if place is None else '>'} rank {rank}  {' '.join(piece)}")
    return "\n".join(lines)
