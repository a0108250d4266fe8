"""Formats the summary of a profile as text."""

from typing import Any

from spanax.check.finding import Finding, Severity

MAX_OPERATIONS = 5
"""Number of operations listed."""


def profile_text(event: dict[str, Any]) -> str:
    """Returns the time per step and device by category, one line each.

    Example:
      >>> parts = {"compute": 0.3, "communication": 0.1, "idle": 0.05, "host": 0.05, "input wait": 0.0}
      >>> print(profile_text({
      ...     "steps": 11, "devices": 8, "step_seconds": 0.5, "seconds": parts, "communication": {"fsdp": 0.1},
      ...     "operations": {"fusion.3": 0.2}, "out": "runs/a/profile",
      ... }))
      profile of 11 steps on 8 devices: 0.5 s per step
        compute        0.3 s  60.0 %
        communication  0.1 s  20.0 %  (fsdp 0.1 s)
        idle           0.05 s  10.0 %
        host           0.05 s  10.0 %
        input wait     0 s  0.0 %
        longest: fusion.3 0.2 s
        in runs/a/profile
    """
    step = event["step_seconds"]
    lines = [f"profile of {event['steps']} steps on {event['devices']} devices: {step:.3g} s per step"]
    for name, seconds in event["seconds"].items():
        parts = ", ".join(f"{axis} {time:.3g} s" for axis, time in event["communication"].items())
        detail = f"  ({parts})" if name == "communication" and parts else ""
        lines.append(f"  {name:13}  {seconds:.3g} s  {100 * seconds / step:.1f} %{detail}")
    longest = list(event["operations"].items())[:MAX_OPERATIONS]
    lines.append("  longest: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in longest))
    lines.append(f"  in {event['out']}")
    for finding in event.get("findings", ()):
        code, severity, path, message, fix = (finding[key] for key in ("code", "severity", "path", "message", "fix"))
        lines.append(str(Finding(code, Severity(severity), path, message, fix)))
    return "\n".join(lines)
