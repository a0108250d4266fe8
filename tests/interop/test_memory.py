"""Weights of a model much larger than its largest tensor: the host never holds more than a few tensors."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spanax.interop.configs import config_json, families
from spanax.interop.hf_import import params_of
from spanax.interop.mapping import arrays_of
from spanax.interop.safetensors import Writer
from spanax.models.gpt import GPT, GPTConfig
from spanax.train.state.weights import MIN_BATCH_BYTES

MEASURE = """
import resource, sys
from pathlib import Path
from spanax.cli import main

def both(source, to):
    main(["import", source, "--as", "gpt2", "--output-dir", f"{to}/in", "--json"])
    main(["export", f"{to}/in", "--as", "gpt2", "--output-dir", f"{to}/out", "--json"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small, large, to = sys.argv[1:]
before = both(small, f"{to}/small")
print(both(large, f"{to}/large") - before)
"""

OVERHEAD_BYTES = 20 << 20
"""What JAX, Orbax and TensorStore hold besides, for 50 tensors."""


def written(folder: Path, config: GPTConfig) -> int:
    """Random weights of a GPT-2, one tensor at a time; returns the bytes of the largest."""
    arrays = arrays_of(families()["gpt2"], params_of(partial(GPT, config)))
    listed = {
        name: SimpleNamespace(shape=array.tensor_shape, dtype="float32") for array in arrays for name in array.names
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(families()["gpt2"], config, "float32")))
    rng = np.random.default_rng(0)
    with Writer(folder / "model.safetensors", listed) as file:
        for name, tensor in listed.items():
            file.put(name, rng.standard_normal(tensor.shape, "float32"))
    return max(4 * int(np.prod(item.shape)) for item in listed.values())


@pytest.mark.slow
def test_the_host_stores_at_most_twice_the_largest_tensor(tmp_path: Path) -> None:
    small = Path(__file__).parent / "weights" / "gpt2"
    largest = written(tmp_path / "large", GPTConfig(300, 64, num_layers=4, num_heads=8, embed_dim=640))
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    allowed = 2 * max(largest, MIN_BATCH_BYTES) + OVERHEAD_BYTES
    assert size > 10 * largest and size > 2 * allowed, "the file shows nothing"
    to = tmp_path / "to"
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(tmp_path / "large"), str(to)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    grown = int(run.stdout.splitlines()[-1]) * 1024
    assert grown < allowed, f"{grown / 1e6:.0f} MB more for a file of {size / 1e6:.0f} MB; {allowed / 1e6:.0f} allowed"
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "large" / name).read_bytes() == (to / "large" / "out" / name).read_bytes()
