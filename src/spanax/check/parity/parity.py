"""Parity: a plan gives the numbers of one device, shown by taking the same steps on both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from spanax.check.parity.example_batches import example_batch
from spanax.errors import SpanaxError
from spanax.hardware.cluster import cluster
from spanax.plan.choose import plan as make_plan
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned
from spanax.run.run import Run
from spanax.run.state.sharded_init import placed
from spanax.run.state.start import start
from spanax.run.step.pipeline.layer_order import layer_order
from spanax.trace.optimizers.gradient_recording import PREFIX
from spanax.trace.program import Program
from spanax.trace.rewrites.remat_policies import GATHERED
from spanax.trace.user_mesh import on_host

Group = Literal["loss", "gradients", "parameters"]
GROUPS: tuple[Group, ...] = get_args(Group)

TOLERANCE: dict[str, dict[Group, float]] = {
    "float32": {"loss": 1e-5, "gradients": 1e-5, "parameters": 1e-5},
    "bfloat16": {"loss": 0.1, "gradients": 0.25, "parameters": 2.0},
}
"""Relative differences that rounding explains, by what is computed in. Source: measured, docs/comparing.md."""

MARGIN = {"float32": 20.0, "bfloat16": 2.0}
"""How much more than one device's own noise a layout may differ. Source: measured, docs/comparing.md."""

JITTERS = 2
"""How often one device's own noise is looked at: more often, and it is seldom missed."""

ZERO = 1e-3
"""Arrays below this share of the largest of their group are rounding about zero, and are held against it instead."""

OPTIMIZER, KEPT_OPTIMIZER = "optimizer.opt_state.", "optimizer.opt_state.1."


@dataclass(frozen=True)
class Difference:
    """How far one array is off: the largest difference over its largest value, over all steps.

    `noise` is what the same array differs by on one device when the parameters are born one rounding error off: what
    an optimizer blows up (Adam, where a gradient is nearly zero) is seen there too. `bound` is what is let pass.
    """

    group: Group
    path: str
    value: float
    noise: float
    bound: float

    @property
    def passes(self) -> bool:
        """Whether rounding explains it."""
        return self.value <= self.bound


@dataclass(frozen=True)
class Parity:
    """A layout's numbers beside those of one device, after the same steps on the same data.

    `dtype` is the coarsest that is computed in; `shrunk` says which sizes were made smaller for it, from and to.
    """

    layout: str
    mesh: dict[str, int]
    steps: int
    dtype: str
    differences: tuple[Difference, ...]
    shrunk: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Whether every array differs by no more than rounding explains."""
        return all(one.passes for one in self.differences)

    def worst(self, group: Group) -> Difference:
        """The array of a group that is farthest off, as a share of what is let pass."""
        of = [one for one in self.differences if one.group == group]
        return max(of, key=lambda one: (one.value / one.bound, one.value))

    def to_json(self) -> dict[str, Any]:
        """What `--parity` adds to the contract: the worst relative difference of each group, and all by path."""
        by_path: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
        for one in self.differences:
            by_path[one.group][one.path] = one.value
        return {
            **{group: self.worst(group).value for group in GROUPS},
            "worst": {group: self.worst(group).path for group in GROUPS},
            "by_path": by_path,
            "passes": self.passes,
            "steps": self.steps,
            "dtype": self.dtype,
            "layout": self.layout,
            "mesh": self.mesh,
            "shrunk": {name: list(sizes) for name, sizes in self.shrunk.items()},
        }


def parity(
    program: Program,
    plan: Plan,
    *,
    steps: int = 3,
    seed: int = 0,
    devices: Sequence[Any] | None = None,
    batch: Callable[[int], Any] | None = None,
) -> Parity:
    """Take the same steps as planned and on one device, and compare loss, gradients and parameters by path.

    Both are born with the numbers of one device and see the same batches. The gradients are those that reach the
    optimizer. The steps that run are those of the program that keeps its gradients; its arrays lie as planned.

    Args:
      program: what `spanax.trace` returned.
      plan: what `spanax.plan` returned for it.
      steps: how many.
      seed: of the parameters and the batches.
      devices: as many as the plan's mesh has, at least; simulated ones do.
      batch: the batch of each step, from 0; made up if left out.

    Raises:
      SpanaxError: the plan is another program's, there are too few devices, or the optimizer cannot be looked into.

    Example:
      >>> import optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> found = parity(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
      >>> found.passes, found.worst("gradients").value < 1e-5
      (True, True)
    """
    if steps < 1:
        raise SpanaxError(f"{steps} steps compare nothing.", fix="steps=3")
    batches = [example_batch(program, seed + at) if batch is None else batch(at) for at in range(steps)]
    planned, recorded, alike = _recorded(as_planned(program, plan), plan)
    alone = start(recorded, _alone(recorded, plan), seed=seed, devices=devices and devices[:1])
    born = [on_host(array) for array in alone.state]
    expected = _taken(alone, batches)
    dtype = coarsest_dtype(recorded)
    noisy = []
    for at in range(JITTERS):
        alone.state = _placed(alone, alone.plan, _jittered(recorded, born, float(jnp.finfo(dtype).eps), at))
        noisy.append(_taken(alone, batches))
    mesh = alike.mesh.build(devices)
    run = Run(recorded, alike, mesh, [])
    run.state = _placed(run, alike, born)
    found = _taken(run, batches)
    differences = _differences(expected, noisy, found, dtype)
    return Parity(planned.layout.name, dict(planned.mesh.axes), steps, dtype, differences)


def coarsest_dtype(program: Program) -> str:
    """The coarsest floating dtype among the values of a train step."""
    dtypes = {getattr(aval, "dtype", None) for aval in program.step.graph.avals}
    floats = [dtype for dtype in dtypes if dtype is not None and jax.dtypes.issubdtype(dtype, np.floating)]
    return str(max(floats, key=lambda dtype: float(jnp.finfo(dtype).eps), default=np.dtype("float32")))


def same_layout(program: Program, plan: Plan) -> Plan:
    """The layout, mesh, pins and schedule of a plan for another program."""
    here = cluster("cpu", plan.mesh.size)
    pins = {name: to or None for name, to in plan.pins}
    return make_plan(program, here, layout=plan.layout, mesh=plan.mesh, pin=pins, schedule=plan.schedule)


def _recorded(program: Program, plan: Plan) -> tuple[Plan, Program, Plan]:
    """The plan, the program that keeps its gradients, and the same layout of that.

    Raises:
      SpanaxError: an array of both would lie otherwise.
    """
    recorded = program.with_gradients()
    alike = same_layout(recorded, plan)
    by_path = {leaf.path: leaf for leaf in alike.leaves}
    for leaf in plan.leaves:
        path = leaf.path.replace(OPTIMIZER, KEPT_OPTIMIZER, 1) if leaf.path.startswith(OPTIMIZER) else leaf.path
        if by_path[path].spec != leaf.spec:
            raise SpanaxError(
                f"`{leaf.path}` would lie otherwise in the program that keeps its gradients.",
                where=f"planned {leaf.spec}, there {by_path[path].spec}",
            )
    return plan, recorded, alike


def _alone(program: Program, plan: Plan) -> Plan:
    schedule = replace(plan.schedule, num_stages=1, num_chunks=1, context=GATHERED, loss_chunks=1)
    return make_plan(program, cluster("cpu:1"), layout="data", schedule=schedule)


def _taken(run: Run, batches: Sequence[Any]) -> dict[tuple[Group, str], np.ndarray]:
    """Losses and gradients of every step, one after the other, and the parameters after the last."""
    losses: dict[str, list[np.ndarray]] = {}
    gradients: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for name, value in run.step(batch).items():
            losses.setdefault(name, []).append(_numbers(value))
        for path, array in run.arrays("optimizer").items():
            if path.startswith(PREFIX):
                gradients.setdefault(path.removeprefix(PREFIX), []).append(_numbers(array))
    found: dict[tuple[Group, str], np.ndarray] = {("loss", name): np.stack(values) for name, values in losses.items()}
    found |= {("gradients", path): np.stack(values) for path, values in gradients.items()}
    for kind in ("param", "other"):
        arrays = run.arrays(kind)
        found |= {("parameters", path): _numbers(array) for path, array in arrays.items() if _is_float(array)}
    return found


def _differences(
    expected: dict[tuple[Group, str], np.ndarray],
    noisy: Sequence[dict[tuple[Group, str], np.ndarray]],
    found: dict[tuple[Group, str], np.ndarray],
    dtype: str,
) -> tuple[Difference, ...]:
    largest = {key: float(np.abs(value).max(initial=0.0)) for key, value in expected.items()}
    tops = {group: max((size for (of, _), size in largest.items() if of == group), default=0.0) for group in GROUPS}
    kind = dtype if dtype in TOLERANCE else "bfloat16"
    differences = []
    for (group, path), value in expected.items():
        scale = max(largest[group, path], ZERO * tops[group]) or 1.0
        off, *noises = (_largest(value - other[group, path]) / scale for other in (found, *noisy))
        noise = max(noises)
        differences.append(Difference(group, path, off, noise, max(TOLERANCE[kind][group], MARGIN[kind] * noise)))
    return tuple(differences)


def _largest(off: np.ndarray) -> float:
    """The largest of the sizes; infinite where something is not a number."""
    return float(np.abs(off).max(initial=0.0)) if np.isfinite(off).all() else float("inf")


def _jittered(program: Program, born: Sequence[Any], eps: float, seed: int) -> list[Any]:
    """The state with every number of every parameter one rounding error off, this way or that."""
    rng = np.random.default_rng(seed)
    state = []
    for leaf, array in zip(program.leaves, born, strict=True):
        if leaf.kind == "param" and jnp.issubdtype(array.dtype, jnp.floating):
            signs = rng.choice((-eps, eps), array.shape)
            array = (array.astype(np.float64) * (1 + signs)).astype(array.dtype)
        state.append(array)
    return state


def _placed(run: Run, plan: Plan, state: Sequence[Any]) -> list[jax.Array]:
    rows = layer_order(run.program, plan)
    places = plan.leaves if rows is None else rows.shown_as
    arrays = [placed(array, place.sharding(run.mesh)) for array, place in zip(state, places, strict=True)]
    return arrays if rows is None else rows.kept(arrays)


def _numbers(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _is_float(array: jax.Array) -> bool:
    return bool(jax.dtypes.issubdtype(array.dtype, np.floating))
