"""Commands: `spanax launch WHERE [flags] -- train ...`."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union

import tyro

from spanax.errors import SpanaxError, nearest
from spanax.launch import kubernetes, local, ray, slurm, workers
from spanax.usage import described

LAUNCH: dict[str, tuple[type, Callable[[Any, Sequence[str]], int]]] = {
    "local": (local.LocalCommand, local.launch),
    "slurm": (slurm.SlurmCommand, slurm.launch),
    "kubernetes": (kubernetes.KubernetesCommand, kubernetes.launch),
    "ray": (ray.RayCommand, ray.launch),
    "workers": (workers.WorkersCommand, workers.launch),
}
"""Where to, each with its flags and what carries it out; that returns an exit code."""

SAYS = "Train in many processes under one that watches over them; what follows `--` is a command of spanax."

KINDS: Any = Union[tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, (kind, _) in LAUNCH.items())]  # noqa: UP007
"""The flags of any of them: for help and completion."""


def launch(argv: Sequence[str]) -> int:
    """Carry out `spanax launch`, given what follows these words; returns the exit code.

    Raises:
      SpanaxError: the request cannot be carried out.
    """
    where, _, rest = argv[0] if argv else "", None, argv[1:]
    if where not in LAUNCH:
        if where in ("-h", "--help"):
            tyro.cli(KINDS, prog="spanax launch", description=described(SAYS, "launch"), args=["--help"])
        raise SpanaxError(f"cannot launch on '{where}'.", fix=nearest(where, LAUNCH))
    at = list(rest).index("--") if "--" in rest else len(rest)
    kind, carry_out = LAUNCH[where]
    name = f"launch {where}"
    command: Any = tyro.cli(kind, prog=f"spanax {name}", description=described(kind, name), args=rest[:at])
    return carry_out(command, rest[at + 1 :])
