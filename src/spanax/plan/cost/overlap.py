"""Communication hidden by computation: what a runtime schedules asynchronously, and what computation hides it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spanax.hardware.cluster import Cluster
from spanax.plan.spmd.terms import HOP, ROUND
from spanax.trace.analysis.op_groups import Phase

Array = np.ndarray


@dataclass(frozen=True)
class Overlap:
    """The share of each class of collective that a runtime schedules asynchronously; 0 is serial.

    Attributes:
      weight_gathers: all-gathers of parameters for the layers that use them next.
      gradient_reductions: reductions of gradients during the backward pass.
      updated_weights: all-gathers of updated parameters, hidden by the next step's forward pass.
      activations: collectives of tensor and sequence parallelism, hidden by the adjacent matmuls.
      permutes: hops of a ring of keys and values.
      all_to_all: exchanges of tokens between experts.
      hops: sends between the stages of a pipeline.

    Example:
      >>> Overlap(weight_gathers=1.0).is_serial, Overlap().is_serial
      (False, True)
    """

    weight_gathers: float = 0.0
    gradient_reductions: float = 0.0
    updated_weights: float = 0.0
    activations: float = 0.0
    permutes: float = 0.0
    all_to_all: float = 0.0
    hops: float = 0.0

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"the share '{name}' is {share}; it must be from 0 to 1")

    @property
    def is_serial(self) -> bool:
        """Whether all communication is exposed."""
        return not any(vars(self).values())


SERIAL = Overlap()

RUNTIMES: dict[str, Overlap] = {
    "serial": SERIAL,
    # No asynchronous collectives but permutes: openxla/xla, the latency-hiding scheduler is off by default.
    "xla-gpu": Overlap(),
    "xla-gpu-latency-hiding": Overlap(weight_gathers=1.0, gradient_reductions=0.5, permutes=1.0),
    "xla-tpu-v5e": Overlap(weight_gathers=6 / 7, gradient_reductions=1.0, activations=5 / 12, permutes=1.0),
    "xla-tpu": Overlap(gradient_reductions=1.0, activations=0.25, permutes=1.0),
    "xla-tpu-sparse-cores": Overlap(weight_gathers=6 / 7, gradient_reductions=1.0, activations=7 / 12, permutes=1.0),
    "fsdp": Overlap(weight_gathers=1.0, gradient_reductions=1.0, permutes=1.0),
    "megatron": Overlap(
        weight_gathers=1.0, gradient_reductions=1.0, updated_weights=1.0, activations=0.95, permutes=1.0, hops=1.0
    ),
}
"""The runtimes, by name.

Source: `xla-*`: schedules of compiled programs (`python benchmarks/overlap.py`, notes/speed.md): the share of a layer's
weights that are gathered or scattered asynchronously, and with `--of activations` the collectives of tensor parallelism
with sequences sharded. Of a layer's 12 on a TPU, 3 of the 6 reduce-scatters become loops of permutes and matmuls; of
the 6 gathers none run during a matmul on v5p and v6e, 2 on v5e, and 4 by the SparseCores. `fsdp`: Zhao et al., arXiv
2304.11277, 3.3, prefetching in the forward and backward pass, and torchtitan, arXiv 2410.06511. `megatron`:
overlap_grad_reduce, overlap_param_gather and overlap_p2p_comm of Megatron-Core. Its tp_comm_overlap, as NeMo sets it
(nemo/collections/llm/recipes/tp_overlap_configs/userbuffers.py): of the ten collectives of a layer the four gathers of
a ring start with the shard that is there, four run during a matmul that does not need them (bulk), and the two
reduce-scatters of the forward pass are sent in four chunks, of which one has no matmul left: (8 + 2 x 3/4) / 10.
"""


def runtime_of(cluster: Cluster) -> Overlap:
    """Returns the overlap of the program that Spanax compiles for a cluster, with its default options.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> runtime_of(cluster("h100:8")).weight_gathers, runtime_of(cluster("cpu:8")).is_serial
      (1.0, True)
    """
    if cluster.platform == "gpu":
        return RUNTIMES["xla-gpu-latency-hiding"]
    if cluster.platform == "tpu":
        return RUNTIMES.get(f"xla-tpu-{cluster.chip.name}", RUNTIMES["xla-tpu"])
    return SERIAL


ONCE = "gradient sync"
"""All-reduces of gradients, once per step, rather than with every microbatch."""

CLASSES = ("activations", "all_to_all", "permutes", "weight_gathers", "gradient_reductions", ONCE, "updated_weights")
"""The classes of collectives, in the order in which they take computation to hide behind: the most urgent first."""

TERMS = dict.fromkeys(CLASSES[:3], "activations between devices") | {ONCE: ONCE}
"""The terms of the step time by class; all others are `weights between devices`."""

Key = tuple[int, bool, str]
"""Phase, whether in the layers, class."""


def class_of(kind: str, of_weights: bool, phase: int) -> str:
    """Returns the class of a collective.

    Sums of weights in the forward pass are the loss, or a mean over the batch.

    Example:
      >>> class_of("all-gather", True, Phase.FORWARD), class_of("all-reduce", True, Phase.BACKWARD)
      ('weight_gathers', 'gradient sync')
    """
    if kind in (HOP, ROUND):
        return "permutes"
    if not of_weights or (kind == "all-reduce" and phase == Phase.FORWARD):
        return "all_to_all" if kind == "all-to-all" else "activations"
    if kind == "all-reduce":
        return ONCE
    if phase == Phase.UPDATE:
        return "updated_weights"
    return "gradient_reductions" if kind == "reduce-scatter" else "weight_gathers"


@dataclass(frozen=True, eq=False)
class Exposed:
    """Exposed and hidden seconds of communication by (phase, in the layers, class), on all layers of one microbatch.

    Those of `ONCE` and of the update are per step. Both are 0 for a missing key.
    """

    seconds: Mapping[Key, Array]
    hidden: Mapping[Key, Array]

    def microbatch(self, term: str, inside: bool) -> Array | float:
        """Returns the exposed seconds of a term in a microbatch's forward and backward pass."""
        return sum(
            seconds
            for (phase, place, name), seconds in self.seconds.items()
            if place == inside and phase != Phase.UPDATE and name != ONCE and _term(name) == term
        )

    def phase(self, phase: Phase) -> Array | float:
        """Returns the exposed seconds of a phase of one microbatch inside the layers."""
        return sum(
            seconds for (when, place, name), seconds in self.seconds.items() if place and when == phase and name != ONCE
        )

    def hidden_by_term(self, shares: Array, num_microbatches: Array) -> dict[str, Array]:
        """Returns the hidden seconds of a step by term, where a stage has one of `shares` parts of the layers."""
        result = dict.fromkeys(map(_term, CLASSES), np.zeros(shares.shape))
        for (phase, inside, name), hidden in self.hidden.items():
            is_once = name == ONCE or phase == Phase.UPDATE
            divided = hidden / shares if inside or phase == Phase.UPDATE else hidden
            result[_term(name)] = result[_term(name)] + divided * (1 if is_once else num_microbatches)
        return result


def _term(name: str) -> str:
    return TERMS.get(name, "weights between devices")


def hide(
    moved: Mapping[Key, Array],
    computing: Mapping[tuple[int, bool], Array],
    overlap: Overlap,
    shares: Array,
    num_layers: int,
) -> Exposed:
    """Returns what of the communication computation of the same phase does not hide.

    At most a class's asynchronous share is hidden, and no more than there is computation that nothing else is hidden
    behind. Gradients reduced once per step hide behind the backward pass of the last microbatch, gathers of updated
    weights behind the next forward pass: those of layers behind the layers, all others behind the whole pass. Of the
    weights of a stage's L layers 1 / L stays exposed: those of the first layer have no layer before them, the gradients
    of the last none after them. Hidden communication slows the computation by its share of the processor, so that
    exposed time is seconds - hidden (1 - contention).

    Args:
      moved: seconds, and the same times their contention.
      computing: seconds of computation by (phase, in the layers).
      overlap: of the runtime.
      shares: number of parts that the layers are divided into.
      num_layers: in the loop over layers; 0 for none.

    Source: Isaev et al., "Calculon", SC 2023: communication occupies a share of the processor that runs it.
    """
    left = dict(computing)
    exposed: dict[Key, Array] = {}
    hidden: dict[Key, Array] = {}
    first = np.minimum(shares / num_layers, 1.0) if num_layers > 1 else np.zeros(shares.shape)
    for (phase, inside, name), (seconds, slowed) in sorted(moved.items(), key=lambda item: CLASSES.index(item[0][2])):
        share = getattr(overlap, FIELD.get(name, name)) * (1.0 - first if _is_per_layer(name) else 1.0)
        hides = np.zeros(shares.shape)
        for window in _windows(phase, inside, name):
            is_per_stage = window[1] and not inside and phase != Phase.UPDATE
            width = shares if is_per_stage else 1.0
            behind = np.minimum(seconds * share - hides, left[window] / width)
            left[window] = left[window] - behind * width
            hides = hides + behind
        contention = np.divide(slowed, seconds, out=np.zeros(shares.shape), where=seconds > 0)
        exposed[phase, inside, name] = seconds - hides * (1.0 - contention)
        hidden[phase, inside, name] = hides
    return Exposed(exposed, hidden)


FIELD = {ONCE: "gradient_reductions"}
"""The fields of `Overlap` by class, where they differ."""

LATER = {ONCE: Phase.BACKWARD, "updated_weights": Phase.FORWARD}
"""Classes that hide behind a phase, whatever phase they are in."""


def _windows(phase: int, inside: bool, name: str) -> list[tuple[int, bool]]:
    """Returns the computation that hides a class, by (phase, in the layers), in the order in which it does.

    Blocks in a list are around the layers: where there is no loop over layers, they are all there is.
    """
    if name not in LATER:
        return [(phase, inside)]
    layers = (LATER[name], True)
    return [layers] if inside else [layers, (LATER[name], False)]


def _is_per_layer(name: str) -> bool:
    return _term(name) != TERMS["activations"]
