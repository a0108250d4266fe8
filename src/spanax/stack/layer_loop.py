"""A loop over stacked layers, run as one: `for block in self.blocks: x = block(x)`.

The loop's body runs once a layer, on stand-ins. The first keeps what it was given, each passes a token on, and the
last, given the token of the one before it, runs the stack. A token can be passed on and nothing else, so a body that
does more with a layer or with what it returns ends in an error, never in other numbers.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from spanax.errors import SpanaxError


@dataclasses.dataclass(eq=False)
class Pass:
    """One way through the layers: what the first was given, and how many were called."""

    stack: Any
    path: str
    x: Any
    rest: Any
    num_called: int = 0


# A loop may ask whether a block is the last one, so a stack's layers are the same objects for as long as it lives.
_LAYERS: weakref.WeakKeyDictionary[Any, "list[Layer]"] = weakref.WeakKeyDictionary()


def layers_of(stack: Any, kind: type, path: str) -> "list[Layer]":
    """The stand-ins for a stack's layers.

    Args:
      stack: what runs all of them; its length is their number.
      kind: the blocks' class, which a loop may ask for.
      path: where in the model the list was.
    """
    if stack not in _LAYERS:
        reference = weakref.ref(stack)
        _LAYERS[stack] = [Layer(reference, index, kind, path) for index in range(len(stack))]
    return _LAYERS[stack]


_READ: contextvars.ContextVar["list[Token] | None"] = contextvars.ContextVar("read", default=None)


@contextlib.contextmanager
def read_tokens() -> "Iterator[list[Token]]":
    """Collects the tokens that JAX tries to read as arrays: it raises a TypeError of its own then."""
    read: list[Token] = []
    before = _READ.set(read)
    try:
        yield read
    finally:
        _READ.reset(before)


class Layer:
    """Layer `index` of a stack in somebody's loop; it may be called, once a pass and in its turn."""

    def __init__(self, stack: weakref.ref[Any], index: int, kind: type, path: str):
        self._stack, self._index, self._kind, self._path = stack, index, kind, path

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return object.__getattribute__(self, "_kind")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args:
            self._refuse("gives a block no x by position", "block(x, ...), x first")
        x, rest = args[0], (args[1:], kwargs)
        strangers = [leaf for leaf in jax.tree.leaves(rest if self._index else args) if type(leaf) is Token]
        if strangers:
            self._refuse(f"gives layer {self._index} {strangers[0]!r}")
        run = self._continued(x, rest) if self._index else Pass(self._stack(), self._path, x, rest)
        run.num_called += 1
        leaves, structure = jax.tree.flatten(run.x)
        if run.num_called < len(run.stack):
            return structure.unflatten([Token(run, self._index, at, leaf) for at, leaf in enumerate(leaves)])
        result = run.stack(run.x, *rest[0], **rest[1])
        if jax.tree.structure(result) != structure:
            self._refuse("has layers that return more than they take")
        return result

    def _continued(self, x: Any, rest: Any) -> Pass:
        """The pass that the layer before it is in."""
        index, before = self._index, self._index - 1
        leaves, structure = jax.tree.flatten(x)
        run = leaves[0]._run if leaves and type(leaves[0]) is Token else None
        if run is None or run.stack is not self._stack() or structure != jax.tree.structure(run.x):
            self._refuse(f"gives layer {index} something else than layer {before} returned")
        found = [(leaf._run, leaf._index, leaf._at) for leaf in leaves if type(leaf) is Token]
        if found != [(run, before, at) for at in range(len(leaves))]:
            self._refuse(f"gives layer {index} something else than layer {before} returned")
        if run.num_called != index:
            self._refuse(f"calls layer {index} twice")
        if not _identical(rest, run.rest):
            fix = "arguments that are the same for all, made before the loop"
            self._refuse(f"gives layer {index} other arguments beside x than layer 0", fix)
        return run

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            fix = "nnx.remat around a block becomes remat='full' of spanax.stack"
            self._refuse(f"hands layer {self._index} to something that is no block", fix)
        self._refuse(f"asks layer {self._index} for `{name}`")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_stack", "_index", "_kind", "_path"):
            self._refuse(f"sets `{name}` of layer {self._index}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"layer {self._index} of `{self._path}`"

    def _refuse(self, does: str, fix: str = "") -> NoReturn:
        raise refusal(self._path, does, fix)


class Token(jax.Array):
    """What a layer is said to have returned, while the loop runs: shape and dtype are there, numbers are not."""

    _run: Pass
    _index: int
    _at: int
    _leaf: Any

    def __init__(self, run: Pass, index: int, at: int, leaf: Any):
        self._run, self._index, self._at, self._leaf = run, index, at, leaf

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # A loop may ask whether it is an array, or one that is traced.
        return type(self._leaf) if isinstance(self._leaf, jax.Array) else Token

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_TOKENS:
            return object.__getattribute__(self, name)
        if name in ("shape", "dtype", "ndim", "size"):
            return getattr(jax.typeof(self._leaf), name)
        if name == "__jax_array__":  # JAX asks from C, where Python 3.13 lets no other error through
            read = _READ.get()
            if read is not None:
                read.append(self)
            raise AttributeError(name)
        return self.refuse()

    def __repr__(self) -> str:
        return f"what layer {self._index} of `{self._run.path}` returned"

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Says what cannot be done with it.

        Raises:
          SpanaxError: always.
        """
        count, total = self._index + 1, len(self._run.stack)
        stops = f", or stops after {count} of {total}" if self._run.num_called == count else ""
        raise refusal(self._run.path, f"uses what layer {self._index} returned{stops}")


_OF_TOKENS = {"_run", "_index", "_at", "_leaf", "refuse", "__class__", "__dict__"}
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()
_USES = [f"{side}{name}" for name in _BINARY for side in ("", "r")]
_USES += "eq ne lt le gt ge neg pos abs invert bool int float complex index len iter getitem contains".split()
_USES += ["array", "round", "hash", "setitem"]
for _name in _USES:
    setattr(Token, f"__{_name}__", Token.refuse)


def refusal(path: str, does: str, fix: str = "") -> SpanaxError:
    """The error for a loop that does more than to pass x on."""
    return SpanaxError(
        f"the loop over `{path}` cannot run as one: it {does}.",
        fix=fix or "a body that is x = block(x) and no more, or leave it a list: spanax.stack(model, lists=[...])",
    )


def _identical(first: Any, second: Any) -> bool:
    """Whether they are the same arrays, and equal where they are none."""
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    plain = (bool, int, float, complex, str, bytes)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(a is b or (type(a) is type(b) and type(a) in plain and a == b) for a, b in pairs)
