"""Layout: which axes each mesh axis shards during computation, and which arrays are sharded further in storage."""

from dataclasses import dataclass

TENSOR_AXES = ("heads", "mlp", "vocab", "hidden", "channels")
"""What tensor parallelism splits, in the order in which it is offered; never two dims of one parameter."""

LAST_RESORT_AXES = ("classes", "features")
"""What it splits where a model has none of those: the outputs, at the price of gathering them."""

PIPE = "pipe"
"""The mesh axis of a pipeline's stages; the only one that may divide something unevenly: the layers."""


@dataclass(frozen=True)
class Layout:
    """An assignment of named axes to mesh axes.

    `computed` lists (mesh axis, named axes it splits): in one value a mesh axis splits one dim, the first of
    its list that the value has. `stored_*` are mesh axes over which that kind of array is kept split in
    addition, and gathered where it is used: all three over `fsdp` is FSDP (ZeRO-3). Mesh axes in `exclusive`
    split at most one dim of any parameter, so that a matmul is split on one side only (Megatron's pairs).
    `sequence_axis` also splits the sequence of every value in which it splits nothing else.

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
        """Every mesh axis that the layout gives something to do."""
        named = [axis for axis, _ in self.computed]
        stored = [*self.stored_params, *self.stored_gradients, *self.stored_optimizer]
        return tuple(dict.fromkeys(named + stored))

    def stored(self, kind: str) -> tuple[str, ...]:
        """The mesh axes over which arrays of a kind (`param`, `gradient`, `optimizer`) are stored split."""
        return {
            "param": self.stored_params,
            "gradient": self.stored_gradients,
            "optimizer": self.stored_optimizer,
        }.get(kind, ())

    def splits(self, axis: str) -> tuple[str, ...]:
        """The named axes that a mesh axis may split."""
        return dict(self.computed).get(axis, ())
