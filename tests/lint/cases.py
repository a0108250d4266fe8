"""Builds the cases of the lint corpus: programs (cached per process), plans, reports and profiles."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import pallas

import programs
import spanax
from spanax.check.finding import Finding
from spanax.check.hlo.collectives import Collective, totals
from spanax.check.lint.lint import lint, lint_profile
from spanax.check.profile import StepProfile
from spanax.check.report import Figures, Report
from spanax.models import gpt
from spanax.models.workloads import load
from spanax.plan.evaluate import evaluate
from spanax.plan.layout import Layout
from spanax.plan.plan import Plan
from spanax.trace.program import Program

Make = Callable[[], list[Finding]]
"""Builds a case and returns its findings."""


class Wide(nnx.Module):
    """Three matmuls, the last one square and `odd` wide."""

    def __init__(self, rngs: nnx.Rngs, width: int, odd: int):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, odd, rngs=rngs)
        self.head = nnx.Linear(odd, odd, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return self.head(self.down(nnx.relu(self.up(x_BD))))


class Tall(nnx.Module):
    """A list of layers, without a scan."""

    def __init__(self, rngs: nnx.Rngs, layers: int):
        self.layers = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(layers)])

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        for layer in self.layers:
            x_BD = nnx.relu(layer(x_BD))
        return x_BD


class Named(nnx.Module):
    """Two layers with axis names in their kernels' annotations."""

    def __init__(self, rngs: nnx.Rngs, names: tuple[str, str]):
        init = nnx.nn.linear.default_kernel_init
        with nnx.use_eager_sharding(False):
            self.up = nnx.Linear(512, 2048, kernel_init=nnx.with_partitioning(init, names), rngs=rngs)
            self.down = nnx.Linear(2048, 512, kernel_init=nnx.with_partitioning(init, names[::-1]), rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x_BD)))


def traced(build: Any, batch: Any, dtype: Any = jnp.bfloat16) -> Program:
    return spanax.trace(
        build=build, optimizer=optax.adamw(1e-3), batch=batch, compute_dtype=dtype,
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip


class Pair(nnx.Module):
    """A layer and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.head = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.up(x_BD)))


def mean_square(y_BD: jax.Array) -> jax.Array:
    return jnp.square(y_BD).mean()


def doubled(x: jax.Array) -> jax.Array:
    """2 x as a Pallas kernel, which has no gradient."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, out_shape=out, interpret=True)(jax.lax.stop_gradient(x))


def added_up(x: jax.Array, dim: int) -> jax.Array:
    """Sums along a dim, as a kernel with a reference."""
    kernel = functools.partial(jnp.cumsum, axis=dim)
    return spanax.partition_like(kernel, kernel)(x)


LOSSES: dict[str, Callable[[Any, jax.Array], Any]] = {
    "ordinary": lambda model, x: (mean_square(model(x)), {"accuracy": (model(x).argmax(-1) == 0).mean()}),
    "accuracy": lambda model, x: (model(x).argmax(-1) == 0).mean(),
    "constant": lambda model, x: jnp.float32(1.0) + 0.0 * x.mean(),
    "cut": lambda model, x: mean_square(model.head(jax.lax.stop_gradient(model.up(x)))),
    "fixed inputs": lambda model, x: mean_square(model(jnp.ones((8, 64)))),
    "both inputs": lambda model, x: mean_square(model(x)) + mean_square(model(jnp.ones((8, 64)))),
    "fixed mask": lambda model, x: mean_square(nnx.Dropout(0.5, rngs=nnx.Rngs(0))(model(x))),
    "fixed features": lambda model, x: mean_square(model(x) @ jax.random.normal(jax.random.key(0), (64, 8))),
    "unused head": lambda model, x: mean_square(model.up(x)),
    "frozen head": lambda model, x: mean_square(model.up(x)),
    "kernel": lambda model, x: mean_square(model(doubled(x))),
    "kernel along the batch": lambda model, x: mean_square(model(added_up(x, 0))),
    "kernel on rows": lambda model, x: mean_square(model(added_up(x, 1))),
    "kernel on weights": lambda model, x: mean_square(model(x) * doubled(model.head.bias[...])),
}


def learner(loss: str, *, on: str) -> Make:
    """A small model with a loss of `LOSSES`; `frozen head` trains only the other layer."""

    def optimizer(model: nnx.Module) -> nnx.Optimizer:
        wrt = nnx.All(nnx.Param, nnx.PathContains("up")) if loss == "frozen head" else nnx.Param
        return nnx.Optimizer(model, optax.adamw(1e-3), wrt=wrt)

    def findings() -> list[Finding]:
        program = spanax.trace(build=Pair, optimizer=optimizer, batch=programs.array(256, 64), loss=LOSSES[loss])
        return case(program, on, layout="data").findings()

    return findings


@functools.cache
def wide(width: int = 1024, odd: int = 1024, batch: int = 4096, dtype: Any = jnp.bfloat16) -> Program:
    return traced(functools.partial(Wide, width=width, odd=odd), programs.array(batch, width), dtype)


@functools.cache
def tall(layers: int) -> Program:
    return traced(functools.partial(Tall, layers=layers), programs.array(4096, 256))


@functools.cache
def named(*names: str) -> Program:
    return traced(functools.partial(Named, names=names), programs.array(4096, 512))


@functools.cache
def model(name: str, batch: int = 64, dtype: Any = jnp.bfloat16, **sizes: int) -> Program:
    """A named workload."""
    return load(name, batch_size=batch, **sizes).trace(learning_rate=1e-3, num_steps=10, compute_dtype=dtype)


@functools.cache
def listed_gpt(layers: int) -> Program:
    """A GPT with its blocks in a list instead of a scan."""
    config = dataclasses.replace(gpt.SIZES["nano"], num_layers=layers, scan_layers=False)
    return spanax.trace(
        build=functools.partial(gpt.GPT, config), optimizer=optax.adamw(1e-3),
        batch=gpt.example_batch(64, config.seq_len), loss=gpt.loss, compute_dtype=jnp.bfloat16,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, its program and its devices, with an optional report."""

    program: Program
    plan: Plan
    cluster: spanax.Cluster
    report: Report | None = None

    def findings(self) -> list[Finding]:
        return lint(self.program, self.plan, self.cluster, self.report)


def case(program: Program, on: str, **options: Any) -> Case:
    machine = spanax.cluster(on)
    return Case(program, spanax.plan(program, machine, **options), machine)


def planned(
    make: Callable[..., Program], *args: Any, on: str, sizes: dict[str, Any] | None = None, **options: Any
) -> Make:
    """The plan that `spanax.plan` returns for some options; the best plan without options."""
    return lambda: case(make(*args, **sizes or {}), on, **options).findings()


def tight(make: Callable[..., Program], share: float, *, on: str, **options: Any) -> Make:
    """A plan on devices whose memory it needs to a given share, by its upper estimate."""

    def findings() -> list[Finding]:
        base = case(make(), on, **options)
        needed = evaluate(base.program, base.plan, base.cluster).candidate.upper_bytes
        return dataclasses.replace(
            base, cluster=dataclasses.replace(base.cluster, memory_bytes=int(needed / share))
        ).findings()

    return findings


def reported(make: Callable[..., Program], *, on: str, flops: float = 1.0, peak: float = 0.5,
         moved: tuple[Collective, ...] = (), **options: Any) -> Make:  # fmt: skip
    """A plan with a compiler's report: FLOPs over the plan's, peak over the memory, and additional collectives."""

    def findings() -> list[Finding]:
        base = case(make(), on, **options)
        planned, limit = {"fsdp": {"all-gather": 1 << 22}}, base.cluster.memory_bytes or 0
        all_moved = {axes: dict(kinds) for axes, kinds in planned.items()}
        for axes, kinds in totals(moved).items():
            for kind, num_bytes in kinds.items():
                all_moved.setdefault(axes, {})[kind] = all_moved.get(axes, {}).get(kind, 0) + num_bytes
        predicted = Figures(flops=1e9, collectives=planned)
        compiled = Figures(flops=flops * 1e9, peak_bytes=int(peak * limit), collectives=all_moved)
        report = Report(3, str(base.cluster), base.plan.layout.name, str(base.plan.mesh), True, "", predicted, compiled,
                        collectives=moved)  # fmt: skip
        return dataclasses.replace(base, report=report).findings()

    return findings


def compiled(make: Callable[..., Program], *args: Any, on: str = "cpu:8", level: int = 2, inputs_only: bool = False,
             **options: Any) -> Make:  # fmt: skip
    """A plan with the partitioner's report; with `inputs_only`, of a jit with only `in_shardings`."""

    def findings() -> list[Finding]:
        base = case(make(*args), on, **options)
        report = spanax.check(base.program, base.plan, base.cluster, level=level, inputs_only=inputs_only, cache=False)
        return dataclasses.replace(base, report=report).findings()

    return findings


def profile(*, host: float = 0.0, idle: float = 0.0, input_wait: float = 0.0) -> StepProfile:
    """A profile of a step of 0.5 s."""
    busy = 0.5 - host - idle - input_wait
    parts = {"compute": busy, "communication": 0.0, "idle": idle, "host": host, "input wait": input_wait}
    return StepProfile(11, 8, 0.5, parts, {}, {"fusion.1": busy})


def profiled(**seconds: float) -> Make:
    return lambda: lint_profile(profile(**seconds))


def own_layout(computed: tuple[str, ...] = ("batch",), **stored: tuple[str, ...]) -> Layout:
    """A layout that stores every kind over `x`, unless given otherwise."""
    axes = {"params": ("x",), "gradients": ("x",), "optimizer": ("x",)} | stored
    return Layout("mine", computed=(("x", computed),), **{f"stored_{kind}": over for kind, over in axes.items()})
