"""Options of the XLA compiler for the chips of a cluster: a table with the reason and source of each.

They apply to the compilation of the step only. Options in XLA_FLAGS apply to the process, and are not changed.
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass

from spanax.errors import FormatError
from spanax.hardware.cluster import Cluster
from spanax.hardware.options import OPTIONS

NONE = "none"
DEFAULT = "default"

VALUES = {bool: re.compile("true|false", re.IGNORECASE), int: re.compile("-?[0-9]{1,18}")}
"""Type of an option -> pattern of its values."""


@dataclass(frozen=True)
class XlaFlag:
    """An option of XLA's compiler that is worth setting on a kind of chip.

    `needs` is what the cluster must have more than one of: `devices` or `slices`. All supported versions have the
    option. With an `axis`, it replaces the value of the same option for programs whose parameters have this axis.
    """

    name: str
    value: str
    platform: str
    needs: str
    reason: str
    source: str
    axis: str = ""


FLAGS = (
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler",
        "True",
        "gpu",
        "devices",
        "moves collectives away from what needs them, so that matmuls run meanwhile; off by default",
        "JAX, GPU performance tips; set in NVIDIA's JAX images (JAX-Toolbox, environment variables)",
    ),
    # The report (GB200, August 2026) names no XLA version with or without the error, and none was reproduced here. It
    # concerns ragged all-to-alls, which a program may also contain in a shard_map of its own.
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler",
        "False",
        "gpu",
        "devices",
        "expert weights: a first backward pass with ragged all-to-alls and many experts gave NaN gradients with it",
        "marin-community/marin #8077 and #8081",
        axis="experts",
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
"""The options that Spanax sets. There are none for CPUs: no option measurably reduced step time there."""


def default_flags(cluster: Cluster, axes: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the options of the table for a cluster and a program, as `name=value`.

    Args:
      cluster: the devices.
      axes: the names of the axes of the program's parameters.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> default_flags(cluster("h100:8")), default_flags(cluster("cpu:8"))
      (('xla_gpu_enable_latency_hiding_scheduler=True',), ())
      >>> default_flags(cluster("h100:8"), {"embed", "experts"})
      ('xla_gpu_enable_latency_hiding_scheduler=False',)
    """
    counts = {"devices": cluster.num_devices, "slices": cluster.num_slices}
    values = {
        flag.name: flag.value
        for flag in FLAGS
        if flag.platform == cluster.platform and counts[flag.needs] > 1 and (not flag.axis or flag.axis in axes)
    }
    return tuple(f"{name}={value}" for name, value in values.items())


def explained(flag: str, axes: Collection[str]) -> str:
    """Returns an option as `name=value`, with the reason if the table has that value because of an axis of the program.

    Example:
      >>> explained("xla_gpu_enable_latency_hiding_scheduler=True", {"experts"})
      'xla_gpu_enable_latency_hiding_scheduler=True'
    """
    reasons = {f"{row.name}={row.value}": row.reason for row in FLAGS if row.axis in axes}
    return f"{flag} ({reasons[flag]})" if flag in reasons else flag


def flags_of(text: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """Parses the options of a user: `none`, or a comma-separated list of `default` and `name=value`.

    Without `default` in the list, the defaults are omitted. The last value of an option takes precedence.

    Raises:
      SpanaxError: the option is unknown, or its value has the wrong type.

    Example:
      >>> flags_of("default,xla_gpu_autotune_level=2", ("xla_gpu_triton_gemm_any=True",))
      ('xla_gpu_triton_gemm_any=True', 'xla_gpu_autotune_level=2')
    """
    values: dict[str, str] = {}
    for item in () if text == NONE else text.split(","):
        for option in default if item.strip() == DEFAULT else (checked(item),):
            name, _, value = option.partition("=")
            values[name] = value
    return tuple(f"{name}={value}" for name, value in values.items())


def checked(flag: str) -> str:
    """Returns an option in the form that XLA parses, with `True` and `False` capitalized.

    Raises:
      SpanaxError: the option is unknown, or its value has the wrong type.
    """
    name, _, value = flag.strip().removeprefix("--").partition("=")
    kind = OPTIONS.get(name.lower())
    if kind is None:
        close = difflib.get_close_matches(name, OPTIONS, n=1)
        example = "--xla-flags none, default, or xla_gpu_triton_gemm_any=true"
        raise FormatError(
            f"cannot set the option '{name[:100]}' for XLA: it is not among those that change the program alone.",
            where="listed in spanax/hardware/options.py; XLA_FLAGS in the environment accepts any option",
            fix=f"did you mean '{close[0]}'?" if close else example,
        )
    if not VALUES[kind].fullmatch(value):
        raise FormatError(
            f"cannot set the option '{name}' for XLA to '{value[:100]}'.",
            fix=f"{name}={'true or false' if kind is bool else 'an integer'}",
        )
    return f"{name.lower()}={value.capitalize()}"


def for_platform(flags: tuple[str, ...], platform: str) -> dict[str, str]:
    """Returns `compiler_options` for a platform, without those of other platforms: a plan may be tested on a CPU.

    Example:
      >>> for_platform(("xla_gpu_triton_gemm_any=True", "xla_dot_merger_threshold_mb=32"), "cpu")
      {'xla_dot_merger_threshold_mb': '32'}
    """
    kind = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    others = tuple(f"xla_{other}_" for other in ("cpu", "gpu", "tpu") if other != kind)
    return dict(flag.split("=", 1) for flag in flags if not flag.startswith(others))  # type: ignore[misc]
