"""XLA's options for the chips of a cluster: one table, each with its reason and its source.

They go to the compiler with the step alone; what stands in XLA_FLAGS holds for the whole process, and stays.
"""

import re
from dataclasses import dataclass

from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster

NONE, DEFAULT = "none", "default"

GIVEN = re.compile(r"(xla_[a-z0-9_]{1,100})=(true|false|-?\d{1,18}(?:\.\d{1,18})?)", re.IGNORECASE)
"""An option and its value. No text: options that take one name files to be read, or written."""


@dataclass(frozen=True)
class XlaFlag:
    """An option of XLA's compiler that is worth setting on a kind of chip.

    `needs` is what a cluster must have: several devices, or several slices. It is known to every supported version.
    """

    name: str
    value: str
    platform: str
    needs: str
    reason: str
    source: str


FLAGS = (
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler",
        "True",
        "gpu",
        "devices",
        "moves collectives away from what needs them, so that matmuls run meanwhile; off by default",
        "JAX, GPU performance tips; set in NVIDIA's JAX images (JAX-Toolbox, environment variables)",
    ),
    XlaFlag(
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "True",
        "tpu",
        "slices",
        "overlaps the all-reduces of gradients between slices with the backward pass",
        "MaxText, benchmarks/xla_flags_library.py @05d3525: DATA_PARALLEL_OVERLAP",
    ),
    XlaFlag(
        "xla_tpu_data_parallel_opt_different_sized_ops",
        "True",
        "tpu",
        "slices",
        "the same where the gradients summed at once are of several sizes",
        "MaxText, benchmarks/xla_flags_library.py @05d3525: DATA_PARALLEL_OVERLAP",
    ),
)
"""What Spanax asks for. CPUs get nothing: no option was measured to make a step faster there."""


def default_flags(cluster: Cluster) -> tuple[str, ...]:
    """The options of the table that a cluster gets, as `name=value`.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> default_flags(cluster("h100:8")), default_flags(cluster("cpu:8"))
      (('xla_gpu_enable_latency_hiding_scheduler=True',), ())
    """
    counts = {"devices": cluster.num_devices, "slices": cluster.num_slices}
    return tuple(
        f"{one.name}={one.value}" for one in FLAGS if one.platform == cluster.platform and counts[one.needs] > 1
    )


def flags_of(said: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """The options that a user asks for: `none`, `default`, or `name=value` with commas between them.

    With values of one's own the defaults are left out, unless `default` is among them; the last value of a name holds.

    Raises:
      SpanaxError: that is no option, or no value that an option may have here.

    Example:
      >>> flags_of("default,xla_gpu_autotune_level=2", ("xla_gpu_triton_gemm_any=True",))
      ('xla_gpu_triton_gemm_any=True', 'xla_gpu_autotune_level=2')
    """
    found: dict[str, str] = {}
    for item in () if said == NONE else said.split(","):
        for one in default if item.strip() == DEFAULT else (checked(item),):
            name, _, value = one.partition("=")
            found[name] = value
    return tuple(f"{name}={value}" for name, value in found.items())


def checked(flag: str) -> str:
    """An option as XLA reads it: `true` and `false` with a capital.

    Raises:
      SpanaxError: that is no option, or no value that an option may have here.
    """
    match = GIVEN.fullmatch(flag.strip().removeprefix("--"))
    if match is None:
        raise SpanaxError(
            f"cannot read the option '{flag.strip()[:200]}' for XLA.",
            where="one is xla_NAME=VALUE, and a value true, false or a number; others go into XLA_FLAGS",
            fix="--xla-flags none, default, or default,xla_gpu_triton_gemm_any=true",
        )
    return f"{match[1].lower()}={match[2].capitalize()}"


def for_platform(flags: tuple[str, ...], platform: str) -> dict[str, str]:
    """The options as a compiler takes them, without those of other kinds of chips: a plan may be tried on a CPU.

    Example:
      >>> for_platform(("xla_gpu_triton_gemm_any=True", "xla_dot_merger_threshold_mb=32"), "cpu")
      {'xla_dot_merger_threshold_mb': '32'}
    """
    kind = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    others = tuple(f"xla_{other}_" for other in ("cpu", "gpu", "tpu") if other != kind)
    return dict(flag.split("=", 1) for flag in flags if not flag.startswith(others))  # type: ignore[misc]
