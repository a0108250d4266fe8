"""Spanax scales plain Flax NNX models over any devices.

Write plain NNX. Spanax traces the train step, infers its logical axes, shards them over a mesh, and trains the model.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import spanax.losses as losses  # noqa: F401
    from spanax.adapters.lora import lora as lora
    from spanax.check.check import check as check
    from spanax.check.report import Report as Report
    from spanax.decoding.decoder import decode as decode
    from spanax.decoding.generate import generate as generate
    from spanax.errors import CompilerError as CompilerError
    from spanax.errors import DataError as DataError
    from spanax.errors import NumbersError as NumbersError
    from spanax.errors import SpanaxError as SpanaxError
    from spanax.errors import WriteError as WriteError
    from spanax.hardware.cluster import Cluster as Cluster
    from spanax.hardware.cluster import cluster as cluster
    from spanax.hardware.cluster import local as local
    from spanax.hardware.mesh import MeshShape as MeshShape
    from spanax.jit.init import init as init
    from spanax.jit.jit import jit as jit
    from spanax.jit.shardings import reshard as reshard
    from spanax.jit.shardings import shardings as shardings
    from spanax.plan.candidate import Search as Search
    from spanax.plan.choose import plan as plan
    from spanax.plan.layout import Layout as Layout
    from spanax.plan.plan import Plan as Plan
    from spanax.plan.search import search as search
    from spanax.plan.sharding.placement import Placement as Placement
    from spanax.processes.devices import simulate as simulate
    from spanax.processes.process_batches import local_batch as local_batch
    from spanax.processes.processes import Group as Group
    from spanax.processes.processes import distributed as distributed
    from spanax.stack.block_lists import stack as stack
    from spanax.stack.stack import Stack as Stack
    from spanax.step.guard import Guard as Guard
    from spanax.step.kernels.partition_like import partition_like as partition_like
    from spanax.trace.jaxpr.dim_maps.rule import rule as rule
    from spanax.trace.loss import value_and_grad as value_and_grad
    from spanax.trace.optimizers.wrapped import logged as logged
    from spanax.trace.program import Program as Program
    from spanax.trace.tracing import trace as trace
    from spanax.trace.variables import Leaf as Leaf
    from spanax.trace.workload import Workload as Workload
    from spanax.train.data.batches import Batches as Batches
    from spanax.train.data.batches import batches as batches
    from spanax.train.data.mixture import Mixture as Mixture
    from spanax.train.data.mixture import mixture as mixture
    from spanax.train.run import Run as Run
    from spanax.train.state.checkpoints import Checkpoints as Checkpoints
    from spanax.train.state.restore import restore as restore
    from spanax.train.state.start import start as start
    from spanax.train.tracking import track as track
    from spanax.train.user_heartbeat import heartbeat as heartbeat

_NAMES = {
    "adapters.lora": "lora",
    "check.check": "check",
    "check.report": "Report",
    "decoding.decoder": "decode",
    "decoding.generate": "generate",
    "errors": "CompilerError DataError NumbersError SpanaxError WriteError",
    "hardware.cluster": "Cluster cluster local",
    "hardware.mesh": "MeshShape",
    "jit.init": "init",
    "jit.jit": "jit",
    "jit.shardings": "reshard shardings",
    "plan.candidate": "Search",
    "plan.choose": "plan",
    "plan.layout": "Layout",
    "plan.plan": "Placement Plan",
    "plan.search": "search",
    "train.data.batches": "Batches batches",
    "train.data.mixture": "Mixture mixture",
    "processes.process_batches": "local_batch",
    "processes.devices": "simulate",
    "processes.processes": "Group distributed",
    "train.run": "Run",
    "train.state.checkpoints": "Checkpoints",
    "train.state.restore": "restore",
    "train.state.start": "start",
    "step.guard": "Guard",
    "step.kernels.partition_like": "partition_like",
    "train.tracking": "track",
    "train.user_heartbeat": "heartbeat",
    "stack.block_lists": "stack",
    "stack.stack": "Stack",
    "trace.jaxpr.dim_maps.rule": "rule",
    "trace.optimizers.wrapped": "logged",
    "trace.program": "Program",
    "trace.tracing": "trace",
    "trace.loss": "value_and_grad",
    "trace.variables": "Leaf",
    "trace.workload": "Workload",
}
"""By module, the public names in it."""

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("losses",)
"""The public names that are modules."""

__all__ = sorted((*_HOME, *_MODULES))


class _FunctionPackage(ModuleType):
    """A package that is also the public function of its name: `spanax.trace(...)`, `import spanax.trace.program`."""

    @property
    def __wrapped__(self) -> Any:
        name = self.__name__.removeprefix("spanax.")
        return getattr(import_module(f"spanax.{_HOME[name]}"), name)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `spanax --help` does not import JAX."""
    if name in _MODULES:
        return import_module(f"spanax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'spanax' has no attribute '{name}'")
    return getattr(import_module(f"spanax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _package in ("check", "jit", "plan", "stack", "trace"):
    import_module(f"spanax.{_package}").__class__ = _FunctionPackage
