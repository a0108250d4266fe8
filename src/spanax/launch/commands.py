"""Commands: `spanax launch WHERE [flags] -- train ...`."""

from collections.abc import Callable, Sequence
from typing import Any

import tyro

from spanax.errors import SpanaxError, nearest
from spanax.launch import kubernetes, local, ray, slurm, workers

LAUNCH: dict[str, tuple[type, Callable[[Any, Sequence[str]], int]]] = {
    "local": (local.LocalCommand, local.launch),
    "slurm": (slurm.SlurmCommand, slurm.launch),
    "kubernetes": (kubernetes.KubernetesCommand, kubernetes.launch),
    "ray": (ray.RayCommand, ray.launch),
    "workers": (workers.WorkersCommand, workers.launch),
}
"""Where to, each with its flags and what carries it out; that returns an exit code."""


def launch(argv: Sequence[str]) -> int:
    """Carry out `spanax launch`, given what follows these words; returns the exit code.

    Raises:
      SpanaxError: the request cannot be carried out.
    """
    where, _, rest = argv[0] if argv else "", None, argv[1:]
    if where not in LAUNCH:
        if where in ("-h", "--help"):
            print(f"usage: spanax launch {{{','.join(LAUNCH)}}} [flags] -- train ...")
            return 0
        raise SpanaxError(f"cannot launch on '{where}'.", fix=nearest(where, LAUNCH))
    at = list(rest).index("--") if "--" in rest else len(rest)
    kind, carry_out = LAUNCH[where]
    command: Any = tyro.cli(kind, prog=f"spanax launch {where}", args=rest[:at])
    return carry_out(command, rest[at + 1 :])
