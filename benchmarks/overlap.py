"""What of a layer's collectives the chips' own compilers schedule during matmuls, of weights or of activations.

Needs libtpu (`pip install -e '.[tpu]'`), or for GPUs `.[cuda12]`, and no chip; some seconds a line. Nothing is timed: a
gather that is started before a matmul and awaited behind it can be hidden, one that is one instruction is waited for.
`--of weights` compiles `fsdp`, `--of activations` tensor parallelism with sequences sharded, over all devices.

Usage:
  python benchmarks/overlap.py [--of weights] [--layers 4] [--on v5e:4x4 v5p:2x2x4 v6e:4x4 h100:8]
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import spanax  # noqa: E402
from spanax.check.compilers.compile import compile_for  # noqa: E402
from spanax.check.compilers.lowered_step import lower  # noqa: E402
from spanax.check.compilers.target import target_of  # noqa: E402
from spanax.check.hlo.messages import parse_hlo  # noqa: E402
from spanax.check.hlo.module import Computation, Instruction, Module, read_module  # noqa: E402
from spanax.hardware.flags import for_platform  # noqa: E402
from spanax.models.workloads import load  # noqa: E402

LARGE_BYTES = 2 << 20
"""A norm's scale and a table of rotary angles are not worth hiding."""

HANDED_ON = ("get-tuple-element", "tuple", "async-update", "fusion")
"""What lies between the beginning of a gather and its end."""

MATMULS, GATHERS = ("convolution", "dot"), ("all-gather", "all-gather-start")
SUMS = ("reduce-scatter", "all-reduce", "all-reduce-start")

LOOP = re.compile(r"windowed_dot_general_body_(rs|ag)|(decomposed_all_gather)_body")
LOOPS = {
    "rs": "products scattered in loops of permutes",
    "ag": "products gathered in loops of permutes",
    "decomposed_all_gather": "weights gathered in loops of permutes",
}
"""XLA's names of loops of permutes around a matmul, and what they are."""

LAYOUTS = {"weights": "fsdp", "activations": "tensor+seq"}

SPARSE_CORES = (
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather=False",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather=True",
    "xla_tpu_enable_all_gather_offload_tracing=True",
    "xla_tpu_use_tc_device_shape_on_sc=True",
    "xla_sc_disable_megacore_partitioning=True",
)
"""Source: MaxText, benchmarks/xla_flags_library.py @05d3525, ENABLE_SPARSECORE_OFFLOADING_FOR_1D_ALL_GATHER."""

PERMUTES = ("xla_tpu_all_gather_collective_matmul_mode=post_spmd",)

OPTIONS = {"none": (), "gathers by the SparseCores": SPARSE_CORES, "gathers as permutes": PERMUTES}


def in_schedule(module: Module, data: bytes) -> Iterator[tuple[Computation, list[Instruction]]]:
    """Every computation that has one, with its instructions in the order in which they run."""
    for sequence in parse_hlo(data).schedule.sequences:
        computation = module.computations[sequence.key]
        order = sequence.value.instruction_ids
        yield computation, [computation.instructions[each] for each in order if each in computation.instructions]


def contains(module: Module, one: Instruction, opcodes: tuple[str, ...]) -> Instruction | None:
    """The first instruction of these kinds that it is, or that what it calls holds."""
    if one.opcode in opcodes:
        return one
    if one.opcode == "while":
        return None
    inner = (module.computations[called].instructions.values() for called in one.called)
    return next((found for ones in inner for each in ones if (found := contains(module, each, opcodes))), None)


def tally(module: Module, order: list[Instruction]) -> Counter[str]:
    """What becomes of the large gathers of a loop's body, and how many products are scattered as they are made."""
    found: Counter[str] = Counter()
    waiting: dict[int, bool] = {}
    names: dict[int, str] = {}
    by_id = {one.id: one for one in order}
    for one in order:
        for body in one.called if one.opcode == "while" else ():
            if windowed := LOOP.search(module.computations[body].name):
                found[LOOPS[windowed[1] or windowed[2]]] += 1
        gather = contains(module, one, GATHERS)
        starts = one.opcode.endswith("-start") or one.name.startswith("async-collective-start")
        ends = one.opcode.endswith("-done") or one.name.startswith("async-collective-done")
        total = contains(module, one, SUMS)
        moves = gather or total
        if moves is not None and starts and moves.shape.num_bytes >= LARGE_BYTES:
            waiting[one.id] = False
            names[one.id] = "" if gather is not None else "sums "
        elif ends and (begun := _begun(one, by_id, waiting)) is not None:
            found[names[begun] + ("beside a matmul" if waiting.pop(begun) else "beside something else")] += 1
        elif one.opcode in ("all-gather", *SUMS) and one.shape.num_bytes >= LARGE_BYTES:
            found["waited for" if one.opcode == "all-gather" else "sums waited for"] += 1
        elif one.opcode == "fusion" and total is not None and one.shape.num_bytes >= LARGE_BYTES:
            found["sums waited for"] += 1  # a scatter of a TPU
        if contains(module, one, MATMULS) is not None:
            waiting = dict.fromkeys(waiting, True)
            found["matmuls"] += 1
    return found


def _begun(one: Instruction, by_id: dict[int, Instruction], waiting: dict[int, bool]) -> int | None:
    """Which of the begun gathers an instruction awaits, through what hands it on."""
    seen: set[int] = set()
    ahead = [*one.operands]
    while ahead:
        at = ahead.pop()
        if at in waiting:
            return at
        if at not in seen and at in by_id and by_id[at].opcode in HANDED_ON:
            seen.add(at)
            ahead += by_id[at].operands
    return None


def measure(on: str, num_layers: int, flags: tuple[str, ...], of: str = "weights") -> list[Counter[str]]:
    """Returns the counts of the loops over layers of a Llama 3 8B step, those with the fewest matmuls first."""
    machine = spanax.cluster(on)
    workload = load("llama3-8b", batch_size=2 * machine.num_devices, seq_len=4096, num_layers=num_layers)
    program = workload.trace(learning_rate=1e-3, num_steps=100, compute_dtype="bfloat16", remat="full")
    mesh = {"mesh": f"model={machine.num_devices}"} if of == "activations" else {}
    plan = spanax.plan(program, machine, layout=LAYOUTS[of], **mesh)
    target = target_of(machine)
    asked = for_platform((*plan.xla_flags, *flags), target.platform)
    data = compile_for(target, lower(program, plan, target.platform), plan.mesh, flags=asked).module
    module = read_module(data)
    instructions = (one for each in module.computations.values() for one in each.instructions.values())
    loops = {called for one in instructions if one.opcode == "while" for called in one.called}
    found = []
    for computation, order in in_schedule(module, data):
        if computation.id in loops and not LOOP.search(computation.name):
            counted = tally(module, order)
            if counted["matmuls"]:
                found.append(counted)
    return sorted(found, key=lambda counted: counted["matmuls"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--of", choices=LAYOUTS, default="weights")
    parser.add_argument("--on", nargs="*", default=["v5e:4x4", "v5p:2x2x4", "v6e:4x4"])
    args = parser.parse_args()
    fates = ("beside a matmul", "beside something else", "waited for")
    kinds = (*fates, *(f"sums {fate}" for fate in fates), *LOOPS.values())
    print("| chips | options | loop | " + " | ".join(kinds) + " |\n" + "|---" * (3 + len(kinds)) + "|")
    for on in args.on:
        for name, flags in OPTIONS.items():
            if flags is SPARSE_CORES and not on.startswith(("v5p", "v6e")):
                continue  # it has none
            if flags and not on.startswith("v"):
                continue
            for loop, counted in enumerate(measure(on, args.layers, flags, args.of), 1):
                counts = " | ".join(str(counted[kind]) for kind in kinds)
                print(f"| {on} | {name} | {loop} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
