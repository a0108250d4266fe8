"""Spanax scales plain Flax NNX models over any devices.

Write plain NNX. Spanax traces the train step, infers its logical axes, shards them over a mesh, and trains the model.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spanax.displays import show_with

if TYPE_CHECKING:
    from spanax.check.check import check
    from spanax.check.report import Report
    from spanax.errors import CompilerError, DataError, NumbersError, SpanaxError, WriteError
    from spanax.hardware.cluster import Cluster, cluster, local
    from spanax.hardware.mesh import MeshShape
    from spanax.plan.candidate import Search
    from spanax.plan.choose import plan
    from spanax.plan.layout import Layout
    from spanax.plan.plan import Placement, Plan
    from spanax.plan.search import search
    from spanax.run.data.batches import Batches, batches
    from spanax.run.data.mixture import Mixture, mixture
    from spanax.run.distributed.devices import simulate
    from spanax.run.run import Run
    from spanax.run.state.restore import restore
    from spanax.run.state.start import start
    from spanax.run.step.guard import Guard
    from spanax.run.tracking import track
    from spanax.stack.block_lists import stack
    from spanax.stack.stack import Stack
    from spanax.trace.jaxpr.dim_maps.rule import rule
    from spanax.trace.optimizers.learning_rates import logged
    from spanax.trace.program import Program
    from spanax.trace.tracing import trace
    from spanax.trace.variables import Leaf
    from spanax.trace.workload import Workload

_HOME = {
    "Batches": "run.data.batches",
    "Cluster": "hardware.cluster",
    "CompilerError": "errors",
    "DataError": "errors",
    "Guard": "run.step.guard",
    "Layout": "plan.layout",
    "Leaf": "trace.variables",
    "MeshShape": "hardware.mesh",
    "Mixture": "run.data.mixture",
    "NumbersError": "errors",
    "Placement": "plan.plan",
    "Plan": "plan.plan",
    "Program": "trace.program",
    "Report": "check.report",
    "Run": "run.run",
    "Search": "plan.candidate",
    "SpanaxError": "errors",
    "Stack": "stack.stack",
    "Workload": "trace.workload",
    "WriteError": "errors",
    "batches": "run.data.batches",
    "check": "check.check",
    "cluster": "hardware.cluster",
    "local": "hardware.cluster",
    "logged": "trace.optimizers.learning_rates",
    "mixture": "run.data.mixture",
    "plan": "plan.choose",
    "restore": "run.state.restore",
    "rule": "trace.jaxpr.dim_maps.rule",
    "search": "plan.search",
    "simulate": "run.distributed.devices",
    "stack": "stack.block_lists",
    "start": "run.state.start",
    "trace": "trace.tracing",
    "track": "run.tracking",
}

__all__ = [
    "Batches",
    "Cluster",
    "CompilerError",
    "DataError",
    "Guard",
    "Layout",
    "Leaf",
    "MeshShape",
    "Mixture",
    "NumbersError",
    "Placement",
    "Plan",
    "Program",
    "Report",
    "Run",
    "Search",
    "SpanaxError",
    "Stack",
    "Workload",
    "WriteError",
    "batches",
    "check",
    "cluster",
    "local",
    "logged",
    "mixture",
    "plan",
    "restore",
    "rule",
    "search",
    "simulate",
    "stack",
    "start",
    "trace",
    "track",
]


class _Lazy(ModuleType):
    """A module that imports public names on first use, so that `spanax --help` does not import JAX.

    The functions `trace`, `plan` and `check` have the names of subpackages. The import of a subpackage would replace
    the function as an attribute of this module; this lookup always returns the function.
    """

    def __getattribute__(self, name: str) -> Any:
        home = _HOME.get(name)
        return getattr(import_module(f"spanax.{home}"), name) if home else super().__getattribute__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


def _notebook(value: Any) -> str:
    from spanax.show.page.notebook import notebook

    return notebook(value)


show_with(_notebook)  # imports the notebook display on first use
sys.modules[__name__].__class__ = _Lazy
