"""Layout: the named axes that each mesh axis shards in computation, and the arrays sharded further in storage."""

from dataclasses import dataclass

TENSOR_AXES = ("heads", "mlp", "vocab", "hidden", "channels")
"""The axes that tensor parallelism shards, in order of preference; never two dims of one parameter."""

LAST_RESORT_AXES = ("classes", "features")
"""Axes it shards where a model has none of those: the outputs, at the cost of an all-gather."""

SPATIAL_AXES = ("height", "frames", "width")
"""The axes of images and videos over which the windows of convolutions slide, in order of preference."""

PIPE = "pipe"
"""The mesh axis of pipeline stages; the only one that may shard a dim, the layers, unevenly."""


@dataclass(frozen=True)
class Layout:
    """An assignment of named axes to mesh axes.

    Attributes:
      computed: (mesh axis, named axes it shards). A mesh axis shards one dim of a value: the first of its list that
        the value has.
      stored_params, stored_gradients, stored_optimizer: mesh axes that also shard these arrays in storage, with an
        all-gather before each use: all three over `fsdp` is FSDP (ZeRO-3).
      exclusive: mesh axes that shard at most one dim of any parameter, so that a matmul is sharded along one dim only
        (Megatron's pairs).
      sequence_axis: a mesh axis that also shards the sequence of every value in which it shards no other dim.

    Example:
      >>> layout = Layout("mine", computed=(("x", ("batch",)), ("y", ("mlp", "heads"))), exclusive=("y",))
      >>> layout.mesh_axes, layout.splits("y")
      (('x', 'y'), ('mlp', 'heads'))
    """

    name: str
    computed: tuple[tuple[str, tuple[str, ...]], ...]
    stored_params: tuple[str, ...] = ()
    stored_gradients: tuple[str, ...] = ()
    stored_optimizer: tuple[str, ...] = ()
    exclusive: tuple[str, ...] = ()
    sequence_axis: str | None = None

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that the layout uses."""
        named = [axis for axis, _ in self.computed]
        stored = [*self.stored_params, *self.stored_gradients, *self.stored_optimizer]
        return tuple(dict.fromkeys(named + stored))

    def stored(self, kind: str) -> tuple[str, ...]:
        """Returns the mesh axes that shard arrays of a kind (`param`, `gradient`, `optimizer`) in storage."""
        return {
            "param": self.stored_params,
            "gradient": self.stored_gradients,
            "optimizer": self.stored_optimizer,
        }.get(kind, ())

    def splits(self, axis: str) -> tuple[str, ...]:
        """Returns the named axes that a mesh axis may shard."""
        return dict(self.computed).get(axis, ())
