"""Runs a Python loop over stacked layers, `for block in self.blocks: x = block(x)`, as one call of the stack.

The loop's body runs once per layer, on placeholders. The first placeholder records its arguments, each returns a
token, and the last, called with the token of the previous layer, runs the stack. A token can only be passed to the
next layer: a body that does anything else with a layer or its result raises an error and never computes other values.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from spanax.errors import SpanaxError, StackError


@dataclasses.dataclass(eq=False)
class Pass:
    """One iteration over all layers: the arguments of the first layer, and the number of layers called."""

    stack: Any
    path: str
    x: Any
    extra: Any
    num_called: int = 0


# A loop may test whether a block is the last (`block is self.blocks[-1]`), so a stack always returns the same objects.
_LAYERS: weakref.WeakKeyDictionary[Any, "list[Layer]"] = weakref.WeakKeyDictionary()


def layers_of(stack: Any, kind: type, path: str) -> "list[Layer]":
    """Returns the placeholders of a stack's layers.

    Args:
      stack: the callable that runs all layers; its length is the number of layers.
      kind: the class of the blocks, which `isinstance` sees.
      path: the path of the list in the model.
    """
    if stack not in _LAYERS:
        reference = weakref.ref(stack)
        _LAYERS[stack] = [Layer(reference, index, kind, path) for index in range(len(stack))]
    return _LAYERS[stack]


_READ: contextvars.ContextVar["list[Token] | None"] = contextvars.ContextVar("read", default=None)


@contextlib.contextmanager
def read_tokens() -> "Iterator[list[Token]]":
    """Collects the tokens that JAX tries to read as arrays, for which JAX raises its own TypeError."""
    tokens: list[Token] = []
    reset_token = _READ.set(tokens)
    try:
        yield tokens
    finally:
        _READ.reset(reset_token)


class Layer:
    """Placeholder of layer `index` of a stack in a loop; it can only be called, once per pass and in order."""

    def __init__(self, stack: weakref.ref[Any], index: int, kind: type, path: str):
        self._stack = stack
        self._index = index
        self._kind = kind
        self._path = path

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return object.__getattribute__(self, "_kind")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args:
            self._refuse("calls a block without a positional argument", "block(x, ...), with x first")
        x = args[0]
        extra = (args[1:], kwargs)
        tokens = [leaf for leaf in jax.tree.leaves(extra if self._index else args) if type(leaf) is Token]
        if tokens:
            self._refuse(f"passes {tokens[0]!r} to layer {self._index}")
        run = self._continued(x, extra) if self._index else Pass(self._stack(), self._path, x, extra)
        run.num_called += 1
        leaves, structure = jax.tree.flatten(run.x)
        if run.num_called < len(run.stack):
            return structure.unflatten(
                [Token(run, self._index, leaf_index, leaf) for leaf_index, leaf in enumerate(leaves)]
            )
        result = run.stack(run.x, *extra[0], **extra[1])
        if jax.tree.structure(result) != structure:
            self._refuse("has layers whose result differs in structure from x")
        return result

    def _continued(self, x: Any, extra: Any) -> Pass:
        """Returns the pass of the previous layer.

        Raises:
          SpanaxError: x is not the result of the previous layer, or the other arguments differ from layer 0's.
        """
        index = self._index
        previous = self._index - 1
        leaves, structure = jax.tree.flatten(x)
        run = leaves[0]._run if leaves and type(leaves[0]) is Token else None
        if run is None or run.stack is not self._stack() or structure != jax.tree.structure(run.x):
            self._refuse(f"calls layer {index} with another value than the result of layer {previous}")
        positions = [(leaf._run, leaf._index, leaf._leaf_index) for leaf in leaves if type(leaf) is Token]
        if positions != [(run, previous, leaf_index) for leaf_index in range(len(leaves))]:
            self._refuse(f"calls layer {index} with another value than the result of layer {previous}")
        if run.num_called != index:
            self._refuse(f"calls layer {index} twice")
        if not _identical(extra, run.extra):
            fix = "compute the arguments before the loop, and pass the same ones to all layers"
            self._refuse(f"calls layers 0 and {index} with different arguments after x", fix)
        return run

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            fix = "in place of nnx.remat around a block, use spanax.stack(..., remat='full')"
            self._refuse(f"passes layer {self._index} to another function", fix)
        self._refuse(f"reads `{name}` of layer {self._index}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_stack", "_index", "_kind", "_path"):
            self._refuse(f"sets `{name}` of layer {self._index}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"layer {self._index} of `{self._path}`"

    def _refuse(self, does: str, fix: str = "") -> NoReturn:
        raise refusal(self._path, does, fix)


class Token(jax.Array):
    """Placeholder of a layer's result while the loop runs: it has a shape and a dtype, but no values."""

    _run: Pass
    _index: int
    _leaf_index: int
    _leaf: Any

    def __init__(self, run: Pass, index: int, leaf_index: int, leaf: Any):
        self._run = run
        self._index = index
        self._leaf_index = leaf_index
        self._leaf = leaf

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # A loop may test whether x is an array or a tracer.
        return type(self._leaf) if isinstance(self._leaf, jax.Array) else Token

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_TOKENS:
            return object.__getattribute__(self, name)
        if name in ("shape", "dtype", "ndim", "size"):
            return getattr(jax.typeof(self._leaf), name)
        if name == "__jax_array__":  # JAX reads it from C, where Python 3.13 allows no other error
            read = _READ.get()
            if read is not None:
                read.append(self)
            raise AttributeError(name)
        return self.refuse()

    def __repr__(self) -> str:
        return f"the result of layer {self._index} of `{self._run.path}`"

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises the error for any use of the token but passing it to the next layer.

        Raises:
          SpanaxError: always.
        """
        count = self._index + 1
        total = len(self._run.stack)
        stops = f", or stops after {count} of {total}" if self._run.num_called == count else ""
        raise refusal(self._run.path, f"uses the result of layer {self._index}{stops}")


_OF_TOKENS = {"_run", "_index", "_leaf_index", "_leaf", "refuse", "__class__", "__dict__"}
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()
_USES = [f"{side}{name}" for name in _BINARY for side in ("", "r")]
_USES += "eq ne lt le gt ge neg pos abs invert bool int float complex index len iter getitem contains".split()
_USES += ["array", "round", "hash", "setitem"]
for _name in _USES:
    setattr(Token, f"__{_name}__", Token.refuse)


def refusal(path: str, does: str, fix: str = "") -> SpanaxError:
    """Returns the error for a loop that does more than pass x from layer to layer."""
    return StackError(
        f"the loop over `{path}` cannot run as one scan: it {does}.",
        fix=fix or "reduce the body to x = block(x), or leave the list out of spanax.stack(model, lists=[...])",
    )


def _identical(first: Any, second: Any) -> bool:
    """Returns whether the array leaves are the same objects and the other leaves are equal."""
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    plain = (bool, int, float, complex, str, bytes)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(a is b or (type(a) is type(b) and type(a) in plain and a == b) for a, b in pairs)
