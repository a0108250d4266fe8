"""The names that clouds and people give to machines: `a3-highgpu-8g`, `p5.48xlarge`, `v5litepod-16`, `8xH100`."""

import re

from spanax.errors import ClusterError
from spanax.hardware.chips import chip_names

MACHINES: dict[str, tuple[str, tuple[int, ...]]] = {
    "a2-highgpu-{}g": ("a100-40gb", (1, 2, 4, 8)),
    "a2-ultragpu-{}g": ("a100-80gb", (1, 2, 4, 8)),
    "a3-highgpu-{}g": ("h100", (1, 2, 4, 8)),
    "a3-megagpu-{}g": ("h100", (8,)),
    "a3-ultragpu-{}g": ("h200", (8,)),
    "a4-highgpu-{}g": ("b200", (8,)),
    "p3.2xlarge": ("v100-16gb", (1,)),
    "p3.8xlarge": ("v100-16gb", (4,)),
    "p3.16xlarge": ("v100-16gb", (8,)),
    "p3dn.24xlarge": ("v100-32gb", (8,)),
    "p4d.24xlarge": ("a100-40gb", (8,)),
    "p4de.24xlarge": ("a100-80gb", (8,)),
    "p5.48xlarge": ("h100", (8,)),
    "p5e.48xlarge": ("h200", (8,)),
    "p5en.48xlarge": ("h200", (8,)),
    "p6-b200.48xlarge": ("b200", (8,)),
    "standard_nd96asr_v4": ("a100-40gb", (8,)),
    "standard_nd96amsr_a100_v4": ("a100-80gb", (8,)),
    "standard_nd96isr_h100_v5": ("h100", (8,)),
    "standard_nd96isr_h200_v5": ("h200", (8,)),
    "ct4p-hightpu-{}t": ("v4", (4,)),
    "ct5lp-hightpu-{}t": ("v5e", (1, 4, 8)),
    "ct5p-hightpu-{}t": ("v5p", (4,)),
    "ct6e-standard-{}t": ("v6e", (1, 4, 8)),
}
"""Machine types of Google Cloud, AWS and Azure: the chip, and its numbers per machine. Source: their documentation."""

CORES = {"v3": 1, "v4": 2, "v5e": 1, "v5litepod": 1, "v5p": 2, "v6e": 1}
"""TPUs whose slices are named `v5p-128`, and what that number counts per device: TensorCores, except on v5e and v6e."""

TYPES = {kind.format(count): (chip, count) for kind, (chip, counts) in MACHINES.items() for count in counts}


def cluster_name(name: str) -> str:
    """Returns the name of a cluster, `chip:size`, for that of a machine type or slice; other names are unchanged.

    Raises:
      ClusterError: the name of a slice counts half a chip.

    Example:
      >>> [cluster_name(name) for name in ("8xH100", "h100x8", "p5.48xlarge", "a3-highgpu-8g:4", "ct6e-standard-4t:4")]
      ['h100:8', 'h100:8', 'h100:8', 'h100:4x8', 'v6e:16']
      >>> [cluster_name(name) for name in ("v5litepod-16", "v5p-128", "v4-32:2", "h100:2x8")]
      ['v5litepod:16', 'v5p:64', 'v4:16:2', 'h100:2x8']
    """
    text = name.lower().replace(" ", "")
    kind, _, machines = text.partition(":")
    if kind in TYPES and (machines or "1").isdecimal():
        chip, count = TYPES[kind]
        if kind.startswith("ct") or not machines:
            return f"{chip}:{count * int(machines or 1)}"
        return f"{chip}:{machines}x{count}"
    if counted := re.fullmatch(r"(\d+)x([a-z].*)|(.+)x(\d+)", text):
        chip, count_text = (counted[2], counted[1]) if counted[2] else (counted[3], counted[4])
        return f"{chip}:{count_text}" if chip in chip_names() else name
    if named := re.fullmatch(r"(\w+)-(\d{1,9})(:\d+)?", text):
        chip = named[1]
        number = int(named[2])
        per_device = CORES.get(chip, 0)
        if per_device and number % per_device:
            message = f"'{name}' counts TensorCores, and a chip has {per_device}."
            raise ClusterError(message, fix=f"{chip}-{number + 1}")
        return f"{chip}:{number // per_device}{named[3] or ''}" if per_device else name
    return name
