"""The machine of a published run: the catalogue's chip, as many as the row has, with the rates that its text states."""

import math
import re
from dataclasses import replace

from published.rows import Row, Skipped
from spanax.errors import SpanaxError
from spanax.hardware.chip import Chip
from spanax.hardware.chips import catalogue
from spanax.hardware.cluster import Cluster, cluster

CHIPS = (
    (r"gb300", "gb300"), (r"\bb300", "b300"), (r"gb200", "gb200"), (r"\bb200", "b200"), (r"h200", "h200"),
    (r"gh200|h100", "h100"), (r"mi300x", "mi300x"),
    (r"a100.{0,12}40", "a100-40gb"), (r"a100", "a100-80gb"), (r"v100.{0,12}16", "v100-16gb"), (r"v100", "v100-32gb"),
    (r"\bl4\b", "l4"), (r"v5p", "v5p"), (r"v5e|v5 ?lite", "v5e"), (r"v6e|trillium", "v6e"),
    (r"tpu ?7x|tpu ?v7|ironwood", "v7"), (r"tpu ?v4|\bv4-", "v4"), (r"tpu ?v3", "v3"),
)  # fmt: skip
"""What a device's text holds, and the chip of the catalogue that it means; the first that fits."""


def cluster_of(row: Row) -> Cluster:
    """The machine of a run: the catalogue's chip, with memory and network rates that its text states.

    Raises:
      Skipped: the device is not in the catalogue, or does not come in that number.
    """
    device = row.text.get("device", "").lower()
    name = next((name for pattern, name in CHIPS if re.search(pattern, device)), None)
    if name is None or name not in catalogue():
        raise Skipped("the device is not in the catalogue")
    chip, nodes = catalogue()[name], _nodes(row)
    try:
        if chip.inside is not None and chip.inside.kind == "torus":
            shape = re.search(r"\b(\d+x\d+(?:x\d+)?)\b", row.text.get("topology", ""))
            exact = (
                shape is not None
                and math.prod(map(int, shape[1].split("x"))) * nodes * chip.devices_per_chip == row.num_devices
            )
            size = shape[1] if shape and exact else str(row.num_devices // nodes)
            result = cluster(f"{name}:{size}" + (f":{nodes}" if nodes > 1 else ""))
        elif row.num_devices % nodes == 0 and row.num_devices // nodes <= (chip.inside.max_devices or 1):
            result = cluster(f"{name}:{nodes}x{row.num_devices // nodes}")
        elif row.num_devices > (most := chip.inside.max_devices or 1) and row.num_devices % most:
            # A job that does not fill a domain of NVLink takes the same number of devices of each.
            inside = next(size for size in range(most, 0, -1) if row.num_devices % size == 0)
            result = cluster(f"{name}:{row.num_devices // inside}x{inside}")
        else:
            result = cluster(name, row.num_devices)
    except SpanaxError as error:
        raise Skipped("the device does not come in that number") from error
    return replace(result, chip=_as_stated(result.chip, row))


def _nodes(row: Row) -> int:
    stated = re.fullmatch(r"(\d+)(?:\.0)?", row.text.get("n_slices_or_nodes", ""))
    nodes = int(stated[1]) if stated else 1 if row.num_devices < 8 else 0
    return nodes if nodes and row.num_devices % nodes == 0 else 1


WATTS = {"h100": 700.0, "h200": 700.0, "a100-80gb": 400.0, "a100-40gb": 400.0}
"""The power limit that the rates of a chip are of. Source: NVIDIA's data sheets, SXM."""

CLOCK_POWER = 1 / 3
"""The clock under a power limit, as a power of it: power is clock x voltage^2, and voltage follows the clock."""


ROWWISE = 0.8
"""The rate of matmuls in eight bits with a scale for each row, casts included, over those with one for each array.

Source: pytorch/ao, torchao/float8/README.md: Llama3-8b on 8 H100 runs 6,150 tokens per second in 16 bits, 7,690 with a
scale for each array, and 6,768 with one for each row; the layers' matmuls are half of the second one's time.
"""


def _as_stated(chip: Chip, row: Row) -> Chip:
    """The chip with the rates that a row's own text gives. A lower clock slows all kernels."""
    text = f"{row.text.get('device', '')} {row.text.get('topology', '')}"
    if rate := re.search(r"([\d.]+) ?TB/s", text):
        chip = replace(chip, memory_bytes_per_second=float(rate[1]) * 1e12)
    if (limit := re.search(r"\b(\d{3}) ?w\b", text.lower())) and chip.name in WATTS:
        share = min(float(limit[1]) / WATTS[chip.name], 1.0) ** CLOCK_POWER
        chip = replace(chip, peak_flops={dtype: share * peak for dtype, peak in chip.peak_flops.items()})
    if "fp8" in chip.matmul_shares and row.states(r"row[- ]?wise"):
        shares = dict(chip.matmul_shares)
        chip = replace(chip, matmul_shares=shares | {"fp8": ROWWISE * shares["fp8"]})
    if chip.between is None or chip.devices_per_host is None:
        return chip
    if rate := re.search(r"(\d+) ?Gbps/node|inter (\d+) ?Gbps", text):
        gigabits = float(rate[1] or rate[2]) / chip.devices_per_host
    elif rate := re.search(r"(\d+) ?Gb/s per GPU", text):
        gigabits = float(rate[1])
    else:
        return chip
    return replace(chip, between=replace(chip.between, bytes_per_second=gigabits / 8 * 1e9))
