"""Compares the numerics of a plan with those of one device, by running the same steps on both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from spanax.check.parity.example_batches import example_batch
from spanax.errors import RangeError, StepError
from spanax.hardware.cluster import cluster
from spanax.plan.choose import plan as make_plan
from spanax.plan.place import as_planned
from spanax.plan.plan import Plan
from spanax.step.pipeline.layer_order import layer_order
from spanax.step.sharded_init import placed
from spanax.trace.jaxpr.remat_policies import GATHERED
from spanax.trace.optimizers.wrapped import PREFIX
from spanax.trace.program import Program
from spanax.trace.user_mesh import on_host
from spanax.train.run import Run
from spanax.train.state.start import start

Group = Literal["loss", "gradients", "parameters"]
GROUPS: tuple[Group, ...] = get_args(Group)

TOLERANCE: dict[str, dict[Group, float]] = {
    "float32": {"loss": 1e-5, "gradients": 1e-5, "parameters": 1e-5},
    "bfloat16": {"loss": 0.1, "gradients": 0.25, "parameters": 2.0},
}
"""Relative differences attributed to rounding, by compute dtype. Source: measured, notes/check-accuracy.md."""

MARGIN = {"float32": 20.0, "bfloat16": 2.0}
"""The allowed ratio of a layout's difference to the noise on one device. Source: measured, notes/check-accuracy.md."""

NUM_NOISE_RUNS = 2
"""The number of perturbed runs on one device that measure the noise."""

ZERO = 1e-3
"""Differences are relative to at least this share of the largest value in the group; smaller arrays are noise."""

OPTIMIZER = "optimizer.opt_state."
RECORDED_OPTIMIZER = "optimizer.opt_state.1."


@dataclass(frozen=True)
class Difference:
    """The largest difference of an array, relative to its largest value, over all steps.

    `noise` is the difference on one device if the initial parameters change by one rounding error; it includes the
    amplification by the optimizer, such as Adam's for gradients near zero. `bound` is the tolerance.
    """

    group: Group
    path: str
    value: float
    noise: float
    bound: float

    @property
    def passes(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.value <= self.bound


@dataclass(frozen=True)
class Parity:
    """The differences between a layout and one device, after the same steps on the same data.

    `dtype` is the lowest-precision compute dtype; `shrunk` has the sizes that were reduced, as (from, to).
    """

    layout: str
    mesh: dict[str, int]
    steps: int
    dtype: str
    differences: tuple[Difference, ...]
    shrunk: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Whether the differences of all arrays are within their tolerances."""
        return all(difference.passes for difference in self.differences)

    def worst(self, group: Group) -> Difference:
        """Returns the largest difference of a group, relative to its tolerance."""
        differences = [difference for difference in self.differences if difference.group == group]
        return max(differences, key=lambda difference: (difference.value / difference.bound, difference.value))

    def to_json(self) -> dict[str, Any]:
        """Returns the `parity` entry of the JSON output: the worst difference of each group, and all by path."""
        by_path: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
        for difference in self.differences:
            by_path[difference.group][difference.path] = difference.value
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
    """Runs the same steps as planned and on one device, and compares losses, gradients and parameters by path.

    Both runs start from the same parameters and see the same batches. Gradients are compared as the optimizer receives
    them. The runs use a variant of the program that records its gradients, with the shardings of the plan.

    Args:
      program: the traced program.
      plan: a plan for it.
      steps: the number of steps.
      seed: the seed of the parameters and batches.
      devices: at least as many devices as the mesh has, which may be simulated.
      batch: returns the batch of a step, counted from 0; random batches by default.

    Raises:
      SpanaxError: the plan was made for another program, there are too few devices, or the gradients of the optimizer
        cannot be recorded.

    Example:
      >>> import optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> result = parity(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
      >>> result.passes, result.worst("gradients").value < 1e-5
      (True, True)
    """
    if steps < 1:
        raise RangeError(f"steps is {steps}; expected an integer >= 1.", fix="steps=3")
    batches = [example_batch(program, seed + index) if batch is None else batch(index) for index in range(steps)]
    recorded, recorded_plan = _with_recorded_gradients(as_planned(program, plan), plan)
    single = start(recorded, _single_device_plan(recorded, plan), seed=seed, devices=devices and devices[:1])
    initial = [on_host(array) for array in single.state]
    expected = _run_steps(single, batches)
    dtype = coarsest_dtype(recorded)
    noisy = []
    for index in range(NUM_NOISE_RUNS):
        single.state = _placed(single, single.plan, _perturbed(recorded, initial, float(jnp.finfo(dtype).eps), index))
        noisy.append(_run_steps(single, batches))
    mesh = recorded_plan.mesh.build(devices)
    run = Run(recorded, recorded_plan, mesh, [])
    run.state = _placed(run, recorded_plan, initial)
    results = _run_steps(run, batches)
    differences = _differences(expected, noisy, results, dtype)
    return Parity(plan.layout.name, dict(plan.mesh.axes), steps, dtype, differences)


def coarsest_dtype(program: Program) -> str:
    """Returns the floating dtype with the lowest precision among the values of a train step."""
    dtypes = {getattr(aval, "dtype", None) for aval in program.step.graph.avals}
    floats = [dtype for dtype in dtypes if dtype is not None and jax.dtypes.issubdtype(dtype, np.floating)]
    floats = [dtype for dtype in floats if np.dtype(dtype).itemsize > 1]  # those of quantized operands are exact
    return str(max(floats, key=lambda dtype: float(jnp.finfo(dtype).eps), default=np.dtype("float32")))


def same_layout(program: Program, plan: Plan) -> Plan:
    """Returns a plan for another program with the same layout, mesh, pins and schedule."""
    machine = cluster("cpu", plan.mesh.size)
    pins = {name: to or None for name, to in plan.pins}
    return make_plan(program, machine, layout=plan.layout, mesh=plan.mesh, pin=pins, schedule=plan.schedule)


def _with_recorded_gradients(program: Program, plan: Plan) -> tuple[Program, Plan]:
    """Returns the program that records its gradients, and the plan of that program.

    Raises:
      SpanaxError: the shardings of an array differ between both plans.
    """
    recorded = program.variant(records_gradients=True)
    recorded_plan = same_layout(recorded, plan)
    by_path = {leaf.path: leaf for leaf in recorded_plan.leaves}
    for leaf in plan.leaves:
        path = leaf.path.replace(OPTIMIZER, RECORDED_OPTIMIZER, 1) if leaf.path.startswith(OPTIMIZER) else leaf.path
        if by_path[path].spec != leaf.spec:
            raise StepError(
                f"`{leaf.path}` has another sharding in the program that records its gradients.",
                where=f"planned {leaf.spec}, recorded {by_path[path].spec}",
            )
    return recorded, recorded_plan


def _single_device_plan(program: Program, plan: Plan) -> Plan:
    schedule = replace(plan.schedule, num_stages=1, num_chunks=1, context=GATHERED, loss_chunks=1, padded=())
    schedule = replace(schedule, remat=None)  # it may name values of fused attention
    return make_plan(program, cluster("cpu:1"), layout="data", schedule=schedule)


def _run_steps(run: Run, batches: Sequence[Any]) -> dict[tuple[Group, str], np.ndarray]:
    """Returns the losses and gradients of all steps, stacked, and the parameters after the last step."""
    losses: dict[str, list[np.ndarray]] = {}
    gradients: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for name, value in run.step(batch).items():
            losses.setdefault(name, []).append(_numbers(value))
        for path, array in run.arrays("optimizer").items():
            if path.startswith(PREFIX):
                gradients.setdefault(path.removeprefix(PREFIX), []).append(_numbers(array))
    results: dict[tuple[Group, str], np.ndarray] = {("loss", name): np.stack(values) for name, values in losses.items()}
    results |= {("gradients", path): np.stack(values) for path, values in gradients.items()}
    for kind in ("param", "other"):
        arrays = run.arrays(kind)
        results |= {
            ("parameters", path): _numbers(array)
            for path, array in arrays.items()
            if jnp.issubdtype(array.dtype, jnp.floating)
        }
    return results


def _differences(
    expected: dict[tuple[Group, str], np.ndarray],
    noisy: Sequence[dict[tuple[Group, str], np.ndarray]],
    results: dict[tuple[Group, str], np.ndarray],
    dtype: str,
) -> tuple[Difference, ...]:
    largest = {key: float(np.abs(value).max(initial=0.0)) for key, value in expected.items()}
    scales = {
        group: max((size for (other_group, _), size in largest.items() if other_group == group), default=0.0)
        for group in GROUPS
    }
    kind = dtype if dtype in TOLERANCE else "bfloat16"
    differences = []
    for (group, path), value in expected.items():
        scale = max(largest[group, path], ZERO * scales[group]) or 1.0
        difference, *noises = (_largest(value - other[group, path]) / scale for other in (results, *noisy))
        noise = max(noises)
        differences.append(
            Difference(group, path, difference, noise, max(TOLERANCE[kind][group], MARGIN[kind] * noise))
        )
    return tuple(differences)


def _largest(difference: np.ndarray) -> float:
    """Returns the largest absolute value; infinity if a value is not finite."""
    return float(np.abs(difference).max(initial=0.0)) if np.isfinite(difference).all() else float("inf")


def _perturbed(program: Program, initial: Sequence[Any], eps: float, seed: int) -> list[Any]:
    """Returns the state with every parameter element changed by one rounding error of random sign."""
    rng = np.random.default_rng(seed)
    state = []
    for leaf, array in zip(program.leaves, initial, strict=True):
        if leaf.kind == "param" and jnp.issubdtype(array.dtype, jnp.floating):
            signs = rng.choice((-eps, eps), array.shape)
            array = (array.astype(np.float64) * (1 + signs)).astype(array.dtype)
        state.append(array)
    return state


def _placed(run: Run, plan: Plan, state: Sequence[Any]) -> list[jax.Array]:
    rows = layer_order(run.program, plan)
    placements = plan.leaves if rows is None else rows.layer_placements
    arrays = [placed(array, placement.sharding(run.mesh)) for array, placement in zip(state, placements, strict=True)]
    return arrays if rows is None else rows.to_rows(arrays)


def _numbers(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
