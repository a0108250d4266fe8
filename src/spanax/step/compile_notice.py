"""Prints an error when the process ends while XLA compiles: Python cannot catch a fatal error of the compiler.

The error comes from a shell that waits for the end of a pipe, and so outlives the process.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax

from spanax.errors import CompilerError
from spanax.plan.plan import Plan

SCRIPT = 'read -r ended || printf "%s\\n" "$1" >&2'


@contextmanager
def compile_notice(name: str, plan: Plan) -> Iterator[None]:
    """Prints an error if the process ends within the `with` statement.

    Args:
      name: what is compiled.
      plan: the plan that it is compiled for.
    """
    shell = shutil.which("sh") if plan.mesh.size > 1 else None
    if shell is None:
        yield
        return
    error = CompilerError(
        f"the process ended while XLA compiled {name}.",
        where=f"layout {plan.layout.name} on {plan.mesh}, jax {jax.__version__}; XLA's own error is above",
        fix="JAX_USE_SHARDY_PARTITIONER=0, which selects another partitioner of XLA; or another layout",
    )
    command = [shell, "-c", SCRIPT, shell, str(error)]
    # In a session of its own: Ctrl-C must not end the shell before the process.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            assert watcher.stdin is not None
            with suppress(BrokenPipeError):
                watcher.stdin.write(b"ended\n")
                watcher.stdin.flush()
