"""Options of the XLA compiler for the chips of a cluster: a table with the reason and source of each.

They apply to the compilation of the step only. Options in XLA_FLAGS apply to the process, and are not changed. A user
may set options that affect just the speed or the rounding of a program. None of them names a file, as `xla_dump_to`
does, which accepts any text, even `7`: a value does not show what an option does.
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass

from spanax.errors import FormatError
from spanax.hardware.cluster import Cluster

BOOLS = """
xla_allow_excess_precision xla_disable_all_hlo_passes xla_enable_fast_math xla_llvm_disable_expensive_passes
xla_cpu_copy_insertion_use_region_analysis xla_cpu_enable_concurrency_optimized_scheduler xla_cpu_enable_fast_math
xla_cpu_enable_fast_min_max xla_cpu_fast_math_honor_division xla_cpu_fast_math_honor_functions
xla_cpu_fast_math_honor_infs xla_cpu_fast_math_honor_nans xla_cpu_multi_thread_eigen xla_cpu_strict_dot_conv_math
xla_cpu_use_fusion_emitters xla_cpu_use_onednn
xla_gpu_copy_insertion_use_region_analysis xla_gpu_deterministic_ops xla_gpu_enable_all_gather_combine_by_dim
xla_gpu_enable_analytical_latency_estimator xla_gpu_enable_analytical_sol_latency_estimator xla_gpu_enable_cublaslt
xla_gpu_enable_cudnn_layer_norm xla_gpu_enable_dynamic_slice_fusion xla_gpu_enable_fast_min_max
xla_gpu_enable_highest_priority_async_stream xla_gpu_enable_latency_hiding_scheduler xla_gpu_enable_libnvptxcompiler
xla_gpu_enable_nccl_comm_splitting xla_gpu_enable_nccl_user_buffers xla_gpu_enable_pipelined_all_gather
xla_gpu_enable_pipelined_all_reduce xla_gpu_enable_pipelined_collectives xla_gpu_enable_pipelined_p2p
xla_gpu_enable_pipelined_reduce_scatter xla_gpu_enable_reassociation_for_converted_ar
xla_gpu_enable_reduce_scatter_combine_by_dim xla_gpu_enable_scatter_determinism_expander xla_gpu_enable_triton_gemm
xla_gpu_enable_while_loop_double_buffering xla_gpu_exclude_nondeterministic_ops xla_gpu_exhaustive_tiling_search
xla_gpu_multi_streamed_windowed_einsum xla_gpu_shard_autotuning xla_gpu_triton_gemm_any
xla_enable_async_all_gather xla_enable_async_all_reduce xla_sc_disable_megacore_partitioning xla_sc_disjoint_spmem
xla_sc_enable_instruction_fusion xla_tpu_assign_all_reduce_scatter_layout xla_tpu_data_parallel_opt_different_sized_ops
xla_tpu_decompose_all_gather_einsum xla_tpu_enable_ag_backward_pipelining
xla_tpu_enable_all_experimental_scheduler_features xla_tpu_enable_all_gather_offload_tracing
xla_tpu_enable_all_reduce_offload_tracing xla_tpu_enable_async_collective_fusion
xla_tpu_enable_async_collective_fusion_fuse_all_gather xla_tpu_enable_async_collective_fusion_fuse_all_reduce
xla_tpu_enable_async_collective_fusion_multiple_steps xla_tpu_enable_data_parallel_all_reduce_opt
xla_tpu_enable_scheduler_memory_pressure_tracking xla_tpu_enable_sparse_core_collective_offload_all_gather
xla_tpu_enable_sparse_core_collective_offload_all_reduce xla_tpu_enable_windowed_einsum_for_all_gather
xla_tpu_megacore_fusion_allow_ags xla_tpu_overlap_compute_collective_tc
xla_tpu_use_bundle_aware_cost_model_for_fusions xla_tpu_use_minor_sharding_for_major_trivial_input
xla_tpu_use_tc_device_shape_on_sc
"""

INTS = """
xla_backend_optimization_level xla_dot_merger_threshold_mb xla_latency_hiding_scheduler_rerun
xla_max_concurrent_host_send_recv xla_multiheap_size_constraint_per_heap
xla_cpu_parallel_codegen_split_count xla_cpu_prefer_vector_width
xla_gpu_all_gather_combine_threshold_bytes xla_gpu_all_reduce_combine_threshold_bytes xla_gpu_autotune_level
xla_gpu_collective_permute_combine_threshold_bytes xla_gpu_collective_permute_decomposer_threshold
xla_gpu_cudnn_gemm_fusion_level xla_gpu_experimental_parallel_collective_overlap_limit
xla_gpu_force_compilation_parallelism xla_gpu_graph_min_graph_size xla_gpu_memory_limit_slop_factor
xla_gpu_reduce_scatter_combine_threshold_bytes xla_gpu_threshold_for_windowed_einsum_mib
xla_tpu_host_transfer_overlap_limit xla_tpu_relayout_group_size_threshold_for_reduce_scatter
xla_tpu_scheduler_percent_shared_memory_limit xla_tpu_scoped_vmem_limit_kib
"""

MODES = "xla_tpu_all_gather_collective_matmul_mode xla_tpu_reduce_scatter_collective_matmul_mode"

BOOL = "true or false"
INT = "an integer"
MODE = "none, auto, post_spmd_conservative or post_spmd"

VALUES = {
    BOOL: re.compile("true|false", re.IGNORECASE),
    INT: re.compile("-?[0-9]{1,18}"),
    MODE: re.compile("none|auto|post_spmd_conservative|post_spmd"),
}
"""The pattern of each kind of values."""

OPTIONS = dict.fromkeys(BOOLS.split(), BOOL) | dict.fromkeys(INTS.split(), INT) | dict.fromkeys(MODES.split(), MODE)
"""Name of an option -> kind of its values.

Sources: for CPUs and GPUs, the compiler of jaxlib 0.10.2 or 0.12.0 accepts the option with this type; for TPUs,
MaxText, benchmarks/xla_flags_library.py @05d3525, and for modes the compiler of libtpu 0.0.52.
"""

NONE = "none"
DEFAULT = "default"


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
    # concerns ragged all-to-alls, by which rows of sorted experts are sent.
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
            where="listed in spanax/hardware/flags.py; XLA_FLAGS in the environment accepts any option",
            fix=f"did you mean '{close[0]}'?" if close else example,
        )
    if not VALUES[kind].fullmatch(value):
        raise FormatError(
            f"cannot set the option '{name}' for XLA to '{value[:100]}'.",
            fix=f"{name}={kind}",
        )
    return f"{name.lower()}={value.capitalize() if kind == BOOL else value}"


def for_platform(flags: tuple[str, ...], platform: str) -> dict[str, str]:
    """Returns `compiler_options` for a platform, without those of other platforms: a plan may be tested on a CPU.

    Example:
      >>> for_platform(("xla_gpu_triton_gemm_any=True", "xla_dot_merger_threshold_mb=32"), "cpu")
      {'xla_dot_merger_threshold_mb': '32'}
    """
    kind = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    others = tuple(f"xla_{other}_" for other in ("cpu", "gpu", "tpu") if other != kind)
    return dict(flag.split("=", 1) for flag in flags if not flag.startswith(others))  # type: ignore[misc]
