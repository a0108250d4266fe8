"""How the arrays of Flax modules are stored in PyTorch, which the type of their module decides."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from flax import nnx

ROLES = {
    "weight": "weight", "kernel": "weight", "scale": "weight", "embedding": "weight", "gamma": "weight",
    "bias": "bias", "beta": "bias", "mean": "mean", "running_mean": "mean", "var": "var", "running_var": "var",
}  # fmt: skip
"""The last part of the path of an array, in Flax and in PyTorch, and its role in its module."""

MOST_STACKED = 2
"""The most dims of a stack: its layers, and what each has several of, such as experts."""

NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm, nnx.GroupNorm)


@dataclass(frozen=True)
class Slot:
    """How the array of a module is stored in PyTorch.

    Attributes:
      path: its path.
      shape: its shape.
      num_dims: the number of its dims in a single layer; those before are of a stack. None if that is unknown.
      orders: the orders in which PyTorch may store these dims; the second is that of GPT-2's `Conv1D`. None if it may
        be any that fits.
    """

    path: str
    shape: tuple[int, ...]
    num_dims: int | None = None
    orders: tuple[tuple[int, ...], ...] | None = None

    @property
    def is_linear(self) -> bool:
        """Whether it is a matrix that PyTorch may store in two orders."""
        return len(self.orders or ()) > 1

    def fits(self, tensor: tuple[int, ...], stacked: tuple[int, ...]) -> list[tuple[int, str]]:
        """Returns the numbers of the orders in which a tensor fits, with its dims and those of a layer.

        Args:
          tensor: the shape of the tensor.
          stacked: how many of it there are, along each dim of a stack.
        """
        num_dims = len(self.shape) - len(stacked) if self.num_dims is None else self.num_dims
        lead = self.shape[: len(self.shape) - num_dims]
        layer = self.shape[len(self.shape) - num_dims :]
        is_stack = num_dims >= 0 and without_ones(lead) == without_ones(stacked) and len(lead) <= MOST_STACKED
        if not is_stack or math.prod(tensor) != math.prod(layer):
            return []
        orders = self.orders
        if orders is None:
            cuts = range(1, num_dims) if len(tensor) == 2 else []
            orders = tuple(tuple([*range(cut, num_dims), *range(cut)]) for cut in [0, *cuts])
        found: dict[str, int] = {}
        for number, order in enumerate(orders):
            groups = _grouped(tensor, [layer[dim] for dim in order])
            if groups is not None:
                named = [" ".join(ascii_uppercase[order[index]] for index in group) for group in groups]
                left = " ".join(name if len(name) == 1 else f"({name})" for name in named)
                found.setdefault(f"{left} -> {' '.join(ascii_uppercase[:num_dims])}", number)
        return [(number, dims) for dims, number in found.items()]


def without_ones(sizes: Sequence[int]) -> list[int]:
    """Returns the sizes other than 1."""
    return [size for size in sizes if size != 1]


def _grouped(tensor: Sequence[int], sizes: Sequence[int]) -> list[list[int]] | None:
    """Returns which consecutive sizes multiply to each dim of a tensor; None if they do not.

    Example:
      >>> _grouped((64, 8), (4, 16, 8)), _grouped((8, 64), (4, 16, 8))
      ([[0, 1], [2]], None)
    """
    groups: list[list[int]] = []
    index = 0
    for size in tensor:
        group: list[int] = []
        while index < len(sizes) and (math.prod(sizes[i] for i in group) < size or sizes[index] == 1):
            group.append(index)
            index += 1
        if math.prod(sizes[i] for i in group) != size:
            return None
        groups.append(group)
    return groups if index == len(sizes) else None


def slots_of(model: nnx.Module) -> Iterator[tuple[str, str, Slot]]:
    """Yields the module, the role and the slot of each parameter and statistic of a model."""
    for path, module in nnx.iter_modules(model):
        values = vars(module).items()
        variables = {name: value for name, value in values if isinstance(value, nnx.Param | nnx.BatchStat)}
        is_leaf = len(variables) == 1 and not any(isinstance(value, nnx.Module) for _, value in values)
        for name, variable in variables.items():
            whole = ".".join(map(str, (*path, name)))
            is_named = bool(path) and (is_leaf or name in ROLES)
            owner = ".".join(map(str, path)) if is_named else whole
            role = ROLES.get(name, "weight") if is_named else "weight"
            yield owner, role, _slot(module, name, whole, tuple(variable.shape))


def _slot(module: nnx.Module, name: str, path: str, shape: tuple[int, ...]) -> Slot:
    """Returns the slot of an array of a module; one of an unknown module of Flax fits no tensor."""
    kernel: list[int] = []
    num_inputs = 1
    match module:
        case nnx.LinearGeneral():
            kernel = [*range(len(module.in_features) + len(module.out_features))]
            num_inputs = len(module.in_features)
        case nnx.Linear():
            kernel = [0, 1]
        case nnx.Einsum():
            inputs, letters, outputs = re.split(",|->", module.einsum_str.replace(" ", ""))
            kernel = sorted(range(len(letters)), key=lambda dim: letters[dim] in outputs)
            num_inputs = sum(letter not in outputs for letter in letters)
        case nnx.Conv():
            rank = len(module.kernel_size)
            kernel = [rank, *range(rank), rank + 1]  # PyTorch stores (out, in, ...)
    if name == "kernel" and kernel:
        by_linear = (*kernel[num_inputs:], *kernel[:num_inputs])
        by_conv = (kernel[-1], *kernel[:-1])
        orders = (by_conv,) if isinstance(module, nnx.Conv) else (by_linear, tuple(kernel))
        return Slot(path, shape, len(kernel), orders)
    if kernel and name == "bias":
        num_dims = 1 if isinstance(module, nnx.Conv) else len(kernel) - num_inputs
        return Slot(path, shape, num_dims, (tuple(range(num_dims)),))
    if isinstance(module, NORMS):
        return Slot(path, shape, 1, ((0,),))
    if isinstance(module, nnx.Embed):
        return Slot(path, shape, 2, ((0, 1),))
    return Slot(path, shape, None, () if type(module).__module__.startswith("flax.") else None)
