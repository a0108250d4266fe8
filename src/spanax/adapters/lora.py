"""Low-rank adapters beside the linear layers of any model.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv 2106.09685).
"""

import functools
import math
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from spanax.adapters.packed import MIN_GROUP, Packed, group_size, is_packed, known_format, pack
from spanax.errors import AdapterError, FormatError, RangeError, UnknownNameError, check_type, nearest

Model = TypeVar("Model", bound=nnx.Module)

LINEAR = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
"""The layers that take an adapter."""

KEYS = ("rank", "alpha", "modules")

RATE = 10
"""The learning rate of adapters, relative to that of all parameters. Source: Thinking Machines, 2025."""

MAX_RANK = 1 << 14
"""More than the width of any model that adapters are for."""

MAX_DIMS = 16
"""Enough dims for the input of any layer, to name those of its kernel."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: `y = kernel x + alpha / rank * B A x`, of which A and B are trained.

    Attributes:
      rank: the rank of the adapters.
      alpha: the scale of their product, times `rank`.
      modules: patterns of the paths, or of the last names, of the layers with an adapter; by default all linear layers
        that repeat in the model, or all linear layers if none repeats.

    Example:
      >>> LoRA.parse("rank=8,modules=q,v")
      LoRA(rank=8, alpha=16.0, modules=('q', 'v'))
    """

    rank: int
    alpha: float
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or not 1 <= self.rank <= MAX_RANK:
            raise RangeError(f"adapters have rank {self.rank}; expected an integer >= 1 and <= {MAX_RANK}.", fix="16")
        if not 0 < self.alpha < math.inf:
            raise RangeError(f"adapters have alpha {self.alpha:g}; expected a number > 0.", fix="32, or leave it out")

    @staticmethod
    def parse(text: str) -> "LoRA":
        """Returns the adapters of `--lora`; alpha is twice the rank by default.

        Raises:
          SpanaxError: a key is unknown or missing, or a number is out of its range.
        """
        values: dict[str, list[str]] = {}
        key = ""
        for part in text.split(","):
            name, equals, value = part.partition("=")
            key = name.strip() if equals else key
            if not key:
                raise FormatError(f"--lora is '{text}', without a rank.", fix="--lora rank=16")
            if key not in KEYS:
                raise UnknownNameError(f"--lora has no '{key}'.", fix=nearest(key, KEYS))
            values.setdefault(key, []).append((value if equals else part).strip())
        numbers = {name: _number(name, values[name]) for name in ("rank", "alpha") if name in values}
        if "rank" not in numbers:
            raise FormatError(f"--lora is '{text}', without a rank.", fix="--lora rank=16")
        rank = numbers["rank"]
        if rank != int(rank) or rank > MAX_RANK:
            what = f"--lora has a rank of {rank:g}; expected an integer >= 1 and <= {MAX_RANK}."
            raise RangeError(what, fix="--lora rank=16")
        return LoRA(int(rank), numbers.get("alpha", 2 * rank), tuple(values.get("modules", ())))

    @property
    def scale(self) -> float:
        """The factor of the product of two adapters."""
        return self.alpha / self.rank

    def __str__(self) -> str:
        modules = f",modules={','.join(self.modules)}" if self.modules else ""
        return f"rank={self.rank},alpha={self.alpha:g}{modules}"


def _number(name: str, texts: list[str]) -> float:
    try:
        (text,) = texts
        number = float(text)
    except ValueError:
        raise FormatError(f"--lora sets {name} to '{','.join(texts)}'.", fix=f"{name}=16") from None
    if not 0 < number < math.inf:
        raise RangeError(f"--lora sets {name} to {number:g}; expected a number > 0.", fix=f"{name}=16")
    return number


def lora(
    model: Model,
    rank: int,
    *,
    rngs: nnx.Rngs,
    alpha: float | None = None,
    modules: str | Sequence[str] = (),
    quantize: str | None = None,
    dtype: Any = None,
) -> Model:
    """Returns a copy of a model with low-rank adapters, whose other parameters are to be frozen.

    A layer gets two `nnx.LoRAParam`s beside its kernel: `lora_a` of shape [*in, rank] and `lora_b` of shape
    [rank, *out], which is zero at first. All paths of the model remain, and stacked layers have stacked adapters. Train
    them with `nnx.Optimizer(model, ..., wrt=nnx.LoRAParam)`: gradients and optimizer state exist only for these.

    Args:
      model: the model; it is not changed.
      rank: the rank of the adapters.
      rngs: the random stream of the initial values.
      alpha: the product of the adapters is scaled by `alpha / rank`; twice the rank by default.
      modules: patterns of paths (`*.attention.q`) or names (`q`) of the layers, each an `nnx.Linear`,
        `nnx.LinearGeneral` or `nnx.Einsum`; by default those that repeat in the model, or all if none does.
      quantize: `nf4` or `int8`, to store the kernels of all repeated layers in 4 or 8 bits; the model unpacks them
        where it reads them.
      dtype: the dtype of the frozen parameters; as they are by default.

    Raises:
      SpanaxError: a pattern matches no layer, the model has adapters already, or there is nothing to pack.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
      >>> adapted = lora(model, 4, rngs=nnx.Rngs(2), modules=["layers.0"], quantize="int8")
      >>> adapted.layers[0].lora_a.shape, adapted.layers[0].lora_b.shape, adapted(jnp.ones((2, 64))).shape
      ((64, 4), (4, 32), (2, 8))
    """
    check_type("rank", rank, int, "rank=16")
    check_type("alpha", alpha, (int, float), "alpha=32")
    check_type("rngs", rngs, nnx.Rngs, "rngs=nnx.Rngs(0)")
    if quantize is not None:
        known_format(quantize)
    named = (modules,) if isinstance(modules, str) else tuple(modules)
    spec = LoRA(rank, 2.0 * rank if alpha is None else float(alpha), named)
    return with_adapters(nnx.clone(model), spec, rngs, quantize=quantize, dtype=dtype)


def with_adapters(model: Model, spec: LoRA, rngs: nnx.Rngs, *, quantize: str | None = None, dtype: Any = None) -> Model:
    """Adds adapters to a model in place, and returns it; as `lora`."""
    layers = dict(_layers(model))
    repeated = {path: layer for path, layer in layers.items() if _repeats(path, layer)} or layers
    chosen = _matching(layers, spec.modules) if spec.modules else repeated
    if not chosen:
        kinds = ", ".join(f"nnx.{kind.__name__}" for kind in LINEAR)
        raise AdapterError("the model has no linear layer to adapt.", fix=f"layers of {kinds}")
    if any(map(is_adapted, layers.values())):
        raise AdapterError("the model has adapters already.", fix="leave --lora out, or the model without them")
    frozen = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]
    to_pack = [] if quantize is None else list(_packable(model, repeated.values()))
    if quantize is not None and not to_pack:
        raise AdapterError(f"the model has no weights to store in {quantize}.", fix="leave `quantize` out")
    for layer in chosen.values():
        _adapt(layer, spec, rngs)
    for node, dim in to_pack:
        pack(node, str(quantize), dim, dtype)
    for node in frozen if dtype is not None else ():
        if not is_packed(node) and jnp.issubdtype(node.dtype, jnp.floating):
            node.set_raw_value(node.get_value().astype(dtype))
    return model


def adapter_paths(model: Any) -> set[str]:
    """Returns the paths of the adapters of a model."""
    found = nnx.iter_graph(model)
    return {".".join(map(str, path)) for path, node in found if isinstance(node, nnx.LoRAParam)}


def packed_paths(model: Any) -> Iterator[tuple[str, Packed]]:
    """Yields the path and the value of each packed parameter."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and is_packed(node):
            yield ".".join(map(str, path)), node.get_raw_value()


def _layers(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, node in nnx.iter_graph(model):
        if isinstance(node, LINEAR):
            yield ".".join(map(str, path)), node


def _repeats(path: str, layer: Any) -> bool:
    """Returns whether a layer is in a list of modules, or has the kernels of several layers."""
    return any(part.isdigit() for part in path.split(".")) or layer.kernel.ndim > len(Dims.of(layer, MAX_DIMS).kernel)


def _matching(layers: dict[str, Any], patterns: tuple[str, ...]) -> dict[str, Any]:
    """Returns the layers whose path or last name matches one of the patterns.

    Raises:
      UnknownNameError: a pattern matches none.
    """
    chosen: dict[str, Any] = {}
    for pattern in patterns:
        found = {
            path: layer
            for path, layer in layers.items()
            if fnmatchcase(path, pattern) or fnmatchcase(path.rpartition(".")[2], pattern)
        }
        if not found:
            names = sorted({path.rpartition(".")[2] for path in layers})
            raise UnknownNameError(
                f"no linear layer of the model matches '{pattern}'.",
                where=f"its linear layers: {', '.join(names)}"[:200],
                fix=nearest(pattern, names),
            )
        chosen |= found
    return {path: layer for path, layer in layers.items() if path in chosen}


@functools.cache
def _adapted(kind: type[Any]) -> type[Any]:
    """Returns the class of a layer with an adapter, which adds `alpha / rank * B A x` to the result of the layer.

    There is one per class of layers, since models are compared by their classes.
    """

    def call(layer: Any, inputs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        result = kind.__call__(layer, inputs, *args, **options)
        operands = (inputs, layer.lora_a[...], layer.lora_b[...])
        inputs, a, b = layer.promote_dtype(operands, dtype=layer.dtype)
        dims = Dims.of(layer, inputs.ndim)
        low = jnp.einsum(f"{dims.inputs},{dims.a}->{dims.low}", inputs, a, precision=layer.precision)
        update = jnp.einsum(f"{dims.low},{dims.b}->{dims.outputs}", low, b, precision=layer.precision)
        return result + (update * layer.lora_scale).astype(result.dtype)

    return type(f"Adapted{kind.__name__}", (kind,), {"__module__": __name__, "__call__": call})


def is_adapted(layer: Any) -> bool:
    """Returns whether a layer has an adapter."""
    return isinstance(layer, LINEAR) and hasattr(layer, "lora_a")


@dataclass(frozen=True)
class Dims:
    """The dims of a linear layer as letters, as in an einsum, and those of its adapter.

    Attributes:
      inputs: of its input.
      kernel: of its kernel, without stacked layers.
      outputs: of its result.

    Example:
      >>> dims = Dims.of(nnx.LinearGeneral((4, 8), 6, axis=(-2, -1), rngs=nnx.Rngs(0)), 3)
      >>> dims.inputs, dims.kernel, dims.outputs, dims.a, dims.b
      ('abc', 'bcA', 'aA', 'bcd', 'dA')
    """

    inputs: str
    kernel: str
    outputs: str

    @staticmethod
    def of(layer: Any, num_dims: int) -> "Dims":
        """Returns the dims of a layer for an input with `num_dims` dims."""
        if isinstance(layer, nnx.Einsum):
            operands, _, outputs = layer.einsum_str.replace(" ", "").partition("->")
            inputs, _, kernel = operands.partition(",")
            return Dims(inputs, kernel, outputs)
        is_general = isinstance(layer, nnx.LinearGeneral)
        axis: tuple[int, ...] = tuple(layer.axis) if is_general else (-1,)
        batch_axis: tuple[int, ...] = tuple(layer.batch_axis) if is_general else ()
        num_features = len(layer.out_features) if is_general else 1
        inputs = string.ascii_lowercase[:num_dims]
        contracted = "".join(inputs[dim] for dim in axis)
        batch = "".join(inputs[dim] for dim in batch_axis)
        features = string.ascii_uppercase[:num_features]
        kept = "".join(dim for dim in inputs if dim not in contracted + batch)
        return Dims(inputs, batch + contracted + features, batch + kept + features)

    @property
    def rank(self) -> str:
        """The letter of the rank."""
        return next(letter for letter in string.ascii_letters if letter not in self.inputs + self.kernel)

    @property
    def _batch(self) -> str:
        return "".join(dim for dim in self.kernel if dim in self.inputs and dim in self.outputs)

    @property
    def contracted(self) -> str:
        """The dims of the kernel that the layer contracts."""
        return "".join(dim for dim in self.kernel if dim not in self.outputs)

    @property
    def a(self) -> str:
        """The dims of `lora_a`."""
        return self._batch + self.contracted + self.rank

    @property
    def b(self) -> str:
        """The dims of `lora_b`."""
        return self._batch + self.rank + "".join(dim for dim in self.kernel if dim not in self.inputs)

    @property
    def low(self) -> str:
        """The dims of the input times `lora_a`."""
        return "".join(dim for dim in self.inputs if dim in self.outputs) + self.rank


def _adapt(layer: Any, spec: LoRA, rngs: nnx.Rngs) -> None:
    """Adds an adapter to a layer in place."""
    dims = Dims.of(layer, MAX_DIMS)
    stacked = layer.kernel.shape[: layer.kernel.ndim - len(dims.kernel)]
    sizes = dict(zip(dims.kernel, layer.kernel.shape[len(stacked) :], strict=True)) | {dims.rank: spec.rank}
    shapes = [(*stacked, *(sizes[dim] for dim in names)) for names in (dims.a, dims.b)]
    # As PEFT initializes them: Kaiming's uniform distribution with a slope of sqrt(5).
    bound = 1 / math.sqrt(math.prod(sizes[dim] for dim in dims.contracted))
    layer.lora_a = nnx.LoRAParam(jax.random.uniform(rngs.params(), shapes[0], layer.param_dtype, -bound, bound))
    layer.lora_b = nnx.LoRAParam(jnp.zeros(shapes[1], layer.param_dtype))
    layer.lora_scale = spec.scale
    kind: Any = type(layer)
    layer.__class__ = _adapted(kind)


def _packable(model: nnx.Module, layers: Iterable[Any]) -> Iterator[tuple[nnx.Variable[Any], int]]:
    """Yields the parameters to pack, and the dim of each along which it is contracted, counted from the last.

    These are the kernels of the repeated linear layers, and other arrays of at least three dims, such as experts and
    filters. Embeddings, biases, norms and the head are not packed.
    """
    dims = {id(layer.kernel): _packed_dim(layer) for layer in layers}
    for path, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Param) or isinstance(node, nnx.LoRAParam):
            continue
        is_other = id(node) not in dims and node.ndim >= 3 and "bias" not in str(path[-1])
        dim = dims.get(id(node), -2 if is_other else None)
        if dim is not None and group_size(node.shape, dim) >= MIN_GROUP:
            yield node, dim


def _packed_dim(layer: Any) -> int:
    dims = Dims.of(layer, MAX_DIMS)
    return dims.kernel.index(dims.contracted[-1]) - len(dims.kernel)
