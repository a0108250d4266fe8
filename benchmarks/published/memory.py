"""Published memory: bytes of compiled steps, and of a state, beside what the planner says one device holds."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

import spanax
from published.cases import degrees_of, refusal
from published.decoder import padded, program_of, shape_of
from published.rows import Skipped, number, read, whole
from published.runtime import compiler_of
from spanax.errors import SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.models import gpt, llama
from spanax.plan.cost.memory.state import state_of
from spanax.plan.cost.peak_memory import Meshes, memory_use, walk
from spanax.plan.presets import layout_for
from spanax.plan.sharding.resolve import resolve
from spanax.plan.space import layout_on, mesh_of
from spanax.plan.spmd.sharded_program import ShardedProgram

MEGATRON_BYTES = 18
"""What Megatron-LM keeps of a parameter: fp16 weight 2, fp32 gradient 4, master weight 4, two moments 8.

Source: Korthikanti et al. (arXiv 2205.05198), as Calculon encodes figure 1.
"""

REMAT = {
    "nothing": "full", "nothing_saveable": "full", "dots_nobatch": "dots", "dots_with_no_batch_dims_saveable": "dots",
    "noremat": "none", "(no remat)": "none",
}  # fmt: skip
AXIS = {"fsdp": "fsdp", "dp": "data", "tp": "model"}


@dataclass(frozen=True)
class Measured:
    """Bytes of one device, measured or stated, and as predicted; `kind` says which."""

    id: str
    kind: str
    measured_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        """By how much the prediction is over."""
        return self.predicted_bytes / self.measured_bytes - 1


def is_compiled(rows: list[dict[str, str]]) -> bool:
    """Whether a file holds what a compiler said of steps."""
    return bool(rows) and {"model", "argument_bytes", "temp_bytes", "remat_policy"} <= set(rows[0])


def compiled(text: Mapping[str, str], id: str) -> list[Measured]:
    """State and peak of a compiled step of a Llama.

    Raises:
      Skipped: its shape, layout or policy is none that we have.
    """
    sizes = re.search(r"d(\d+) H(\d+) K(\d+) F(\d+) V(\d+) S(\d+)", text["model"])
    batch = whole(dict(text), "global_batch_seqs") or int((re.search(r" B(\d+)", text["model"]) or ["", "0"])[1])
    layers, devices = whole(dict(text), "n_layers"), whole(dict(text), "n_devices")
    if sizes is None or not batch or not layers or not devices:
        raise Skipped("the compiled step's shape is not stated")
    if text["remat_policy"] not in REMAT or text.get("strategy") not in AXIS:
        raise Skipped("a policy or layout of its own")
    d, heads, kv, f, vocab, s = map(int, sizes.groups())
    config = llama.LlamaConfig(vocab, s, layers, heads, kv, d, f)
    program = _llama(config, batch, REMAT[text["remat_policy"]])
    groups = _peak_groups(program, MeshShape.of({AXIS[text["strategy"]]: devices}))
    state = sum(groups[name] for name in ("parameters", "optimizer", "other state"))
    arguments, temporary = (number(dict(text), key) or math.nan for key in ("argument_bytes", "temp_bytes"))
    remat = REMAT[text["remat_policy"]]
    scale = "toy" if text["model"].startswith("toy") else "Llama 8B"
    return [
        Measured(id, "state of compiled steps", arguments, state),
        Measured(id, f"state and temporaries, {scale}, remat {remat}", arguments + temporary, sum(groups.values())),
    ]


def stated(text: dict[str, str], file: str, number_in_file: int) -> Measured:
    """Returns the state that a published run keeps on one device.

    Raises:
      Skipped: what was measured is another framework's allocator, or activations that it keeps and XLA does not.
    """
    size = number(text, "mem_gib")
    if size is None:
        raise Skipped("no memory was measured")
    if not re.search(r"params?\+grads?\+opt", text.get("mem_kind", "")):
        raise Skipped("memory of another framework's activations and allocator")
    row = read(file, text, number_in_file)
    shape = shape_of(row)
    shape = type(shape)(**{**vars(shape), "vocab_size": padded(shape.vocab_size, row.tensor)})
    sizes, storing = degrees_of(row, compiler_of(row))
    mesh = mesh_of(sizes)
    program = program_of(shape, 16 * row.batch_shards, "full")
    try:
        resolver = resolve(program, layout_on(storing, False, mesh), mesh, {})
    except SpanaxError as error:
        raise Skipped(refusal(error)) from error
    ones = np.ones(1)
    shards = np.asarray([[mesh.ways([axis])] for axis in mesh.names], float)
    meshes = Meshes(shards, num_stages=ones * row.stages, num_microbatches=ones, in_flight=ones, scale=ones)
    memory = memory_use(state_of(resolver), walk(ShardedProgram(resolver, program.step)), meshes)
    params = float(memory.groups["parameters"][0]) / 4
    return Measured(row.id, "state of published runs", size * 2**30, params * MEGATRON_BYTES)


@functools.lru_cache(maxsize=2)
def _llama(config: llama.LlamaConfig, batch: int, remat: str) -> spanax.Program:
    build = functools.partial(llama.Llama, config)
    workload = spanax.Workload(build=build, batch=gpt.example_batch(batch, config.seq_len), loss=llama.loss)
    return workload.trace(learning_rate=1e-4, num_steps=10, compute_dtype=jax.numpy.bfloat16, remat=remat)


def _peak_groups(program: spanax.Program, mesh: MeshShape) -> dict[str, int]:
    try:
        resolver = resolve(program, layout_for(mesh), mesh, {})
    except SpanaxError as error:
        raise Skipped(refusal(error)) from error
    ones = np.ones(1)
    shards = np.asarray([[mesh.size]], float)
    level = walk(ShardedProgram(resolver, program.step), is_tpu=True)
    meshes = Meshes(shards, num_stages=ones, num_microbatches=ones, in_flight=ones, scale=ones)
    memory = memory_use(state_of(resolver), level, meshes)
    return {name: int(values[0]) for name, values in memory.groups.items()}
