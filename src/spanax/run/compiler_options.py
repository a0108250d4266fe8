"""Options: what a plan asks of XLA's compiler, tried before anything else is made."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from spanax.errors import SpanaxError
from spanax.hardware.cluster import local
from spanax.hardware.flags import default_flags, flags_of, for_platform
from spanax.plan.plan import Plan
from spanax.run.step.platform import platform_of


def flagged(plan: Plan, asked: str | None, devices: Sequence[Any]) -> Plan:
    """Returns the plan with the options for XLA that --xla-flags asks for; the plan itself if it is not set.

    Raises:
      SpanaxError: one cannot be read.
    """
    if asked is None:
        return plan
    default = default_flags(local(devices[: plan.mesh.size]), plan.param_axes)
    return replace(plan, xla_flags=flags_of(asked, default))


def check_accepted(plan: Plan, mesh: jax.sharding.Mesh) -> None:
    """Hold the options of a plan against the compiler for these devices.

    Raises:
      SpanaxError: it does not know one of them, or not that value of it.
    """
    options = for_platform(plan.xla_flags, platform_of(mesh))
    if not options:
        return
    try:
        jax.jit(lambda x: x + 1, compiler_options=options).lower(jax.ShapeDtypeStruct((), "int32")).compile()
    except jax.errors.JaxRuntimeError as error:
        raise SpanaxError(
            f"XLA does not take an option: {str(error).splitlines()[0].partition(': ')[2][:200]}",
            where=", ".join(plan.xla_flags)[:200],
            fix="--xla-flags none, or names that this version of XLA has",
        ) from None
