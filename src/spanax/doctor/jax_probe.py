"""Trial: JAX started in a process of its own, `python -P -m spanax.doctor.jax_probe [NUM_SIMULATED]`.

A plugin may hang, abort, or print what it likes; none of that may happen to the process that asks.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanax.doctor.software import THREADS
from spanax.doctor.verdict import Verdict

COMMAND = (sys.executable, "-P", "-m", "spanax.doctor.jax_probe")
MARK = "spanax-doctor-trial:"
"""What the line with the answer begins with: C++ libraries print to standard output, too."""

SIMULATED = 8
ACCELERATORS = {"nvidia[0-9]*": ("GPU", "jax[cuda12]"), "accel[0-9]*": ("TPU", "jax[tpu]"), "kfd": ("GPU", "jax[rocm]")}
"""By what lies in /dev: what it is, and what to install for it."""

END_SECONDS = 5.0
"""How long a process that was killed is waited for; one that hangs in a driver cannot be killed at all."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: with an answer, or with the reason why not."""

    answer: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    last_line: str = ""
    seconds: float = 0.0


def devices(
    environ: Mapping[str, str], timeout: float, *, command: Sequence[str] = COMMAND, dev: Path = Path("/dev")
) -> Verdict:
    """Whether JAX starts, computes on every device, and uses the accelerators that are there."""
    platforms = environ.get("JAX_PLATFORMS", "")
    # Several processes of a host may ask at once, and each would take most of a GPU's memory.
    outcome = probe_jax(command, {**environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, timeout)
    if outcome.reason:
        fix = "JAX_PLATFORMS=cpu starts without accelerators; end other processes that hold them"
        if "XLA_FLAGS" in outcome.last_line:
            fix = "take the flag out of XLA_FLAGS"
        where = "; ".join(filter(None, [f"JAX_PLATFORMS={platforms}" if platforms else "", outcome.last_line]))
        return Verdict("devices", "problem", f"JAX does not start: {outcome.reason}.", where, fix)
    found = outcome.answer
    kind = found["kind"] + (f" ({found['platform']})" if found["platform"] not in found["kind"] else "")
    told = f"{found['devices']} x {kind}, JAX starts in {outcome.seconds:.1f} s"
    for pattern, (missed, package) in ACCELERATORS.items():
        # What JAX was told not to use is not missed.
        if found["platform"] == "cpu" and "cpu" not in platforms and any(dev.glob(pattern)):
            what = f"there is a {missed}, and JAX uses the CPU."
            return Verdict("devices", "warning", what, told, f"pip install '{package}', of jaxlib's version")
    return Verdict("devices", "ok", told)


def simulated(environ: Mapping[str, str], timeout: float, *, command: Sequence[str] = COMMAND) -> Verdict:
    """Whether a CPU can be split into devices that add up numbers among each other."""
    changed = {"JAX_PLATFORMS": "cpu", "NPROC": str(THREADS), "XLA_FLAGS": ""}
    outcome = probe_jax([*command, str(SIMULATED)], {**environ, **changed}, timeout)
    if outcome.reason:
        what = f"{SIMULATED} simulated devices do not work: {outcome.reason}."
        return Verdict("simulated", "problem", what, outcome.last_line, "more threads (ulimit -u), or a newer jaxlib")
    return Verdict("simulated", "ok", f"{SIMULATED} devices on the CPU add up in {outcome.seconds:.1f} s")


def probe_jax(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> Outcome:
    """Run a trial; it and all that it started are gone when this returns, or cannot be killed."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        # Files, not pipes: a grandchild that lives on holds no one up.
        child = subprocess.Popen(command, env=dict(environ), stdout=out, stderr=out, start_new_session=True)
        try:
            code = child.wait(timeout)
            reason = "" if code == 0 else _told(code)
        except subprocess.TimeoutExpired:
            reason = f"no answer within {timeout:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
        out.seek(0)
        lines = [line.strip() for line in out.read(1 << 20).splitlines() if line.strip()]
    seconds = time.monotonic() - began
    answers = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not reason and answers:
        return Outcome(json.loads(answers[-1]), seconds=seconds)
    return Outcome({}, reason or "it says nothing", lines[-1][:300] if lines else "", seconds)


def _told(code: int) -> str:
    return f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with code {code}"


def main(num_simulated: int | None) -> None:
    """Start JAX, compute on every device, or across all simulated ones, and say what there is."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if num_simulated is not None:
        jax.config.update("jax_num_cpu_devices", num_simulated)
    found = jax.local_devices()
    assert num_simulated in (None, len(found)), found
    for device in found:
        assert float(jnp.sum(jax.device_put(np.arange(8.0), device))) == 28.0, device
    if num_simulated is not None:
        mesh = jax.sharding.Mesh(np.array(found), ("all",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
        assert float(jax.jit(jnp.sum)(jax.device_put(np.arange(8.0), split))) == 28.0
    answer = {"platform": found[0].platform, "kind": found[0].device_kind, "devices": len(found)}
    print(f"{MARK}{json.dumps(answer)}", flush=True)
    os._exit(0)  # what a plugin does while Python ends is no part of the trial


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
