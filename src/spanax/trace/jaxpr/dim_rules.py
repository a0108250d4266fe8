"""Names that the rewrites still import."""

from spanax.trace.axes.discover import Dims
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.dim_maps.rule import rule as rule
from spanax.trace.jaxpr.dim_maps.table import names
from spanax.trace.jaxpr.dim_maps.table import reshape_groups as reshape_groups
from spanax.trace.jaxpr.graph import Op

ELEMENTWISE, FRESH = names(Family.ELEMENTWISE), names(Family.FRESH, Family.IOTA)


def apply(op: Op, dims: Dims) -> None:
    """Joins the dims that must be sharded together because of one operation."""
    dims.add(op)
