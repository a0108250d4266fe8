"""Why a dim is not sharded, how an array is stored, and why a layout is rejected."""

from dataclasses import asdict, dataclass
from enum import Enum


class Code(Enum):
    """The kinds of reasons; the value of each is its text, with the fields of `Reason`."""

    NOT_DIVISIBLE = "{name} ({size}) is not divisible by {num_shards}"
    AXIS_USED = "'{axis}' does not shard {detail}: it shards another dim of {name}"
    TWO_DIMS = "'{axis}' does not shard {detail}: it would shard two dims of {name}"
    ROUTER_SCORES = "only a router's scores have {name}"
    NO_WORK = "no matmul or convolution has {name} ({size}), such as the steps of a loop"

    STORED_UNPADDED = "{name} ({size}) is padded in computation only: the array is stored with its own size"
    STORED = "stored over {axis}"
    REPLICATED = "stored replicated: no dim of {name} is divisible by {axis}={num_shards}"
    ANNOTATED = "as the model's author annotated it"
    ANCHORED = "as it was sharded before"
    ANNOTATED_SIZE_1 = "annotated over {axis}, and replicated because the dim has size 1"

    BATCH_NOT_DIVISIBLE = "the batch is not divisible by the mesh axes that shard it"
    IDLE_AXIS = "a mesh axis has nothing to shard"
    SIZE_NOT_DIVISIBLE = "a size is not divisible"
    NOTHING_STORED = "storage would shard no array"
    PIN_NOT_IN_MESH = "an axis is pinned to a mesh axis of size 1"
    TOO_LARGE = "it does not fit into memory"
    NOT_REQUESTED = "another layout or mesh was requested"
    SAME_COST = "sequence parallelism would change neither time nor memory"
    INEXACT = "microbatches would change the loss, or evaluate it twice"
    NO_REMAT = "remat {name}: {detail}"
    RING_TOO_LONG = "a ring of more than {size} devices is priced on request only"
    RING_SLOWER = "ring attention saves no time: every device has whole examples"
    NO_RING = "ring attention: {detail}"
    NO_HEADS = "heads and examples are not divisible by the mesh axis that shards the sequence"
    KERNEL_REPEATED = "devices would repeat the work of an attention kernel"
    SAME_SHARDING = "another remat policy, schedule or number of microbatches of the same sharding is faster"
    STORES_RECOMPUTED = "the zero-bubble schedule would store what remat recomputes, until the gradient of the weights"
    NO_STAGES = "stages: {detail}"
    NO_CHUNKS = "interleaved stages: {detail}"
    NOT_ASSIGNED = "another assignment of one axis is slower, or needs more memory where nothing fits"
    NOT_PLACED = "{name}: {detail}"
    ASSIGNED = "{name}, by local search: a step takes {detail} less than with the fastest preset"
    ASSIGNED_FITS = "{name}, by local search: no preset fits"
    PADDED = "{name} padded: a step takes {detail} less than with the fastest layout without padding"
    PADDED_FITS = "{name} padded: no layout fits without padding"
    IN_HOST_MEMORY = "{name} in host memory: no layout fits into the memory of the devices"
    SAVED_VALUES = "remat {name}: a step takes {detail} less than with the fastest policy of all layers"
    NOT_SAVED = "another selection of values to save is slower, or does not fit"
    NOT_COMPARED = "priced, not compared"
    WRITTEN_DTYPE = "computed in {name}: {detail}"

    LAYOUT_REQUESTED = "as requested"
    MESH_NAMES = "implied by the names of the mesh axes"

    LOGITS_IN_CHUNKS = "logits in {size} chunks: {detail} less"
    LOGITS_UNSUPPORTED = "logits in one chunk: {detail}"
    LOGITS_NO_FASTER = "logits in one chunk: more chunks save memory, and no time"
    LOGITS_SLOWER = "logits in one chunk: 2 chunks take {detail} longer"
    LOGITS_SAVE_LITTLE = "logits in one chunk: 2 chunks save little"


@dataclass(frozen=True)
class Reason:
    """One reason; `str` renders it.

    Attributes:
      code: the kind of reason.
      name: the named axis, parameter, shape or remat policy it is about.
      axis: the mesh axes, joined by `+`.
      size: the size of a dim, or a number of chunks.
      num_shards: the number of shards that were requested.
      detail: a quantity, the name of an axis, or the message of an error.

    Example:
      >>> str(Reason(Code.NOT_DIVISIBLE, "mlp", size=10, num_shards=4))
      'mlp (10) is not divisible by 4'
    """

    code: Code
    name: str = ""
    axis: str = ""
    size: int = 0
    num_shards: int = 0
    detail: str = ""

    def __str__(self) -> str:
        return self.code.value.format(**asdict(self))
