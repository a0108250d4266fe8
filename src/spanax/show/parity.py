"""A parity proof as text."""

from rich.table import Table

from spanax.check.parity.parity import GROUPS, Parity
from spanax.show.tables import table_text


def parity_text(found: Parity) -> str:
    """The worst of each group beside what is let pass, and every array that is over it."""
    mesh = ",".join(f"{axis}={size}" for axis, size in found.mesh.items())
    lines = [
        f"parity of {found.layout} on {mesh} with one device: {found.steps} steps, {found.dtype}: "
        + ("the same numbers" if found.passes else "OTHER NUMBERS")
    ]
    if found.shrunk:
        sizes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in found.shrunk.items())
        lines.append(f"  too big for this machine, and made smaller: {sizes}; every array is split as before")
    table = Table("worst of", "array", "difference", "one device's noise", "let pass", box=None, pad_edge=False)
    for group in GROUPS:
        one = found.worst(group)
        table.add_row(group, one.path, f"{one.value:.2g}", f"{one.noise:.2g}", f"{one.bound:.2g}")
    lines.append(table_text(table))
    for one in found.differences:
        if not one.passes:
            lines.append(f"  {one.group} of {one.path} differ by {one.value:.2g}, and {one.bound:.2g} are let pass")
    return "\n".join(lines)
