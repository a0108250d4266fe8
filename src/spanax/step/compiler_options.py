"""XLA compiler options of a plan, and a check that the compiler accepts them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from spanax.errors import FormatError
from spanax.hardware.cluster import local
from spanax.hardware.flags import default_flags, flags_of, for_platform
from spanax.plan.plan import Plan
from spanax.step.platform import platform_of


def flagged(plan: Plan, requested: str | None, devices: Sequence[Any]) -> Plan:
    """Returns the plan with the XLA options of --xla-flags; the plan itself if the flag is not set.

    Raises:
      SpanaxError: an option cannot be parsed.
    """
    if requested is None:
        return plan
    default = default_flags(local(devices[: plan.mesh.size]), plan.param_axes)
    return replace(plan, xla_flags=flags_of(requested, default))


def check_accepted(plan: Plan, mesh: jax.sharding.Mesh) -> None:
    """Checks that the compiler for these devices accepts the XLA options of a plan.

    Raises:
      SpanaxError: an option is unknown to it, or has an unknown value.
    """
    options = for_platform(plan.xla_flags, platform_of(mesh))
    if not options:
        return
    try:
        jax.jit(lambda x: x + 1, compiler_options=options).lower(jax.ShapeDtypeStruct((), "int32")).compile()
    except jax.errors.JaxRuntimeError as error:
        raise FormatError(
            f"XLA rejects an option: {str(error).splitlines()[0].partition(': ')[2][:200]}",
            where=", ".join(plan.xla_flags)[:200],
            fix="--xla-flags none, or options of this version of XLA",
        ) from None
