"""Starts JAX in a separate process, `python -P -m spanax.doctor.jax_probe`.

A plugin may hang, abort or print anything; the process that runs the checks must not be affected.
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
from pathlib import Path

from spanax.doctor.machine import Verdict

COMMAND = (sys.executable, "-P", "-m", "spanax.doctor.jax_probe")
MARK = "spanax-doctor-trial:"
"""Prefix of the line with the answer: C++ libraries print to standard output, too."""

ACCELERATORS = {"nvidia[0-9]*": ("GPU", "jax[cuda12]"), "accel[0-9]*": ("TPU", "jax[tpu]"), "kfd": ("GPU", "jax[rocm]")}
"""For patterns of files in /dev, the accelerator and the package that supports it."""

END_SECONDS = 5.0
"""How long to wait for a killed process; one that hangs in a driver cannot be killed."""


def devices(
    environ: Mapping[str, str], timeout: float, *, command: Sequence[str] = COMMAND, dev: Path = Path("/dev")
) -> Verdict:
    """Checks that JAX starts, computes on every device, and uses the installed accelerators."""
    platforms = environ.get("JAX_PLATFORMS", "")
    began = time.monotonic()
    # Several processes of a host may probe at once, and each would preallocate most of a GPU's memory.
    code, lines = output_of(command, {**environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, timeout)
    answers = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if code != 0 or not answers:
        reason = "no output" if code == 0 else f"the process ended with code {code}"
        if code is None:
            reason = f"no answer within {timeout:g} s"
        elif code < 0:
            reason = f"the process died of {signal.Signals(-code).name}"
        last_line = lines[-1][:300] if lines else ""
        fix = "end other processes that use the accelerators, or start without them: JAX_PLATFORMS=cpu"
        if "XLA_FLAGS" in last_line:
            fix = "remove the flag from XLA_FLAGS"
        where = "; ".join(filter(None, [f"JAX_PLATFORMS={platforms}" if platforms else "", last_line]))
        return Verdict("devices", "problem", f"JAX does not start: {reason}.", where, fix)
    answer = json.loads(answers[-1])
    kind = answer["kind"] + (f" ({answer['platform']})" if answer["platform"] not in answer["kind"] else "")
    summary = f"{answer['devices']} x {kind}, JAX starts in {time.monotonic() - began:.1f} s"
    for pattern, (accelerator, package) in ACCELERATORS.items():
        # Accelerators that JAX_PLATFORMS excludes are not reported.
        if answer["platform"] == "cpu" and "cpu" not in platforms and any(dev.glob(pattern)):
            message = f"this machine has a {accelerator}, but JAX uses the CPU."
            return Verdict("devices", "warning", message, summary, f"pip install '{package}' in the version of jaxlib")
    return Verdict("devices", "ok", summary)


def output_of(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> tuple[int | None, list[str]]:
    """Returns the exit code of a process, None if it exceeds the timeout, and the lines that it printed.

    Its process group has ended then, unless it cannot be killed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        # Files, not pipes: a grandchild that survives would block the reader.
        child = subprocess.Popen(command, env=dict(environ), stdout=out, stderr=out, start_new_session=True)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
        out.seek(0)
        return code, [line.strip() for line in out.read(1 << 20).splitlines() if line.strip()]


def main() -> None:
    """Starts JAX, computes on every device, and prints the result."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    devices = jax.local_devices()
    for device in devices:
        assert float(jnp.sum(jax.device_put(np.arange(8.0), device))) == 28.0, device
    answer = {"platform": devices[0].platform, "kind": devices[0].device_kind, "devices": len(devices)}
    print(f"{MARK}{json.dumps(answer)}", flush=True)
    os._exit(0)  # ignores what plugins do while Python exits


if __name__ == "__main__":
    main()
