"""Layouts without findings, and near misses that must not trigger one code."""

import functools
from typing import NamedTuple

import jax.numpy as jnp

import programs
from lint.cases import (
    Make,
    compiled,
    learner,
    model,
    named,
    own_layout,
    planned,
    profiled,
    reported,
    tall,
    tight,
    wide,
)
from lint.mistakes import GATHER, SHORT, stages
from spanax.check.hlo.collectives import Collective

BEST = [
    ("gpt-nano", "a100:8"), ("gpt-nano", "v5e:2x4"), ("gpt-nano", "cpu:8"), ("gpt2", "a100:2x8"),
    ("gpt2-medium", "v5e:2x4:2"), ("llama-nano", "v5p:2x2x2"), ("llama-nano", "cpu:8"), ("moe-nano", "h100:8"),
    ("resnet-nano", "v5e:2x2:2"), ("resnet-nano", "cpu:8"), ("vit-nano", "cpu:8"),
]  # fmt: skip
"""Models and devices whose best plan has no findings."""

CLEAN: dict[str, Make] = {
    **{f"the best for {name} on {on}": planned(model, name, on=on) for name, on in BEST},
    "a replicated matrix that fits": planned(wide, on="a100:8", layout="data"),
    "an MLP with float32 on a CPU": planned(wide, 1024, 1024, 4096, None, on="cpu:8", layout="data"),
    "half of the memory": tight(wide, 0.5, on="a100:8", layout="data"),
    "7 layers in a list": planned(tall, 7, on="a100:8", layout="data"),
    "FSDP of a model that does not fit": planned(model, "gpt2-xl", on="v5e:4x4", layout="fsdp"),
    "FSDP of Llama 3 8B on a node": planned(model, "llama3-8b", on="h100:8", layout="fsdp", sizes=SHORT),
    "HSDP of Llama 3 8B on two nodes": planned(
        model, "llama3-8b", on="h100:2x8", mesh="data=2,fsdp=8", layout="hsdp", sizes=SHORT
    ),
    "FSDP and a tensor axis inside a node": planned(
        model, "llama3-70b", on="h100:8x8", mesh="fsdp=16,model=4", layout="fsdp+tensor", sizes=SHORT
    ),
    "FSDP and a tensor axis on a torus": planned(
        model, "llama3-8b", on="v5p:2x2x2", mesh="fsdp=4,model=2", layout="fsdp+tensor", sizes=SHORT
    ),
    "the best for a GPT, as compiled": compiled(programs.zoo_program, "gpt"),
    "data parallelism of a CNN, as compiled": compiled(programs.zoo_program, "cnn", layout="data"),
    "the best for a GPT, by the partitioner's passes": compiled(programs.zoo_program, "gpt", level=1),
}  # fmt: skip


class Near(NamedTuple):
    """A code that must not be reported; others may be."""

    code: str
    make: Make


PLANNED = Collective(
    "all-gather", "fsdp", "bf16", "bf16[1024,4096]", 64 << 10, 8, 8, "all-gather.1", "jit(step)/dot_general",
    "/home/me/model.py:31", tensors=("up.kernel",),
)  # fmt: skip
zoo_compiled = functools.partial(compiled, programs.zoo_program)

NEAR: dict[str, Near] = {
    "1,024 columns": Near("SPX001", planned(wide, 1024, 1024, on="a100:8", layout="fsdp")),
    "counters of an optimizer in host memory": Near(
        "SPX001", planned(model, "gpt-nano", on="v5e:2x4", layout="fsdp", offload="optimizer")
    ),
    "replicated, as in data parallelism": Near("SPX001", planned(wide, 1024, 1021, on="a100:8", layout="data")),
    "an axis of one device": Near("SPX002", planned(model, "gpt2", on="v5e:2x4", mesh="x=8,y=1", layout=own_layout())),
    "an axis that shards the sequence": Near("SPX002", planned(model, "gpt2", on="h100:8", mesh="data=2,context=4")),
    "3 % more FLOPs": Near("SPX003", reported(wide, on="a100:8", layout="data", flops=1.03)),
    "57 % more FLOPs of convolutions": Near(
        "SPX003", reported(functools.partial(programs.zoo_program, "cnn"), on="v5e:2x4", layout="data", flops=1.57)
    ),
    "ZeRO-1": Near("SPX004", planned(model, "gpt2", on="h100:8", layout="zero1")),
    "a pin that takes effect": Near(
        "SPX005",
        planned(model, "gpt2", on="a100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor", pin={"mlp": "model"}),
    ),
    "names of dims": Near("SPX005", planned(named, "embed", "mlp", on="v5e:2x4", layout="fsdp")),
    "names of this mesh": Near(
        "SPX005", planned(named, "fsdp", "model", on="a100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor")
    ),
    "sequence parallelism of 64 tokens": Near(
        "SPX005", planned(model, "gpt-nano", on="a100:8", mesh="fsdp=2,model=4", layout="fsdp+tensor+seq")
    ),
    "16 heads over 8, a vocabulary that divides": Near(
        "SPX006", planned(model, "llama3-8b", on="a100:8", layout="tensor", sizes=SHORT)
    ),
    "32 microbatches on four stages": Near(
        "SPX007", planned(model, "gpt2", on="a100:8", mesh="data=2", layout="data", schedule=stages(4, 32))
    ),
    "FSDP inside the node": Near("SPX008", planned(wide, 4096, 4096, 64, on="a100:8", layout="fsdp")),
    "FSDP across nodes, a large batch": Near(
        "SPX008", planned(model, "llama3-8b", on="h100:2x8", layout="fsdp", sizes=SHORT)
    ),
    "FSDP of a state that does not fit": Near("SPX009", planned(model, "gpt2-xl", on="v5e:2x4", layout="fsdp")),
    "HSDP with its axes in order": Near(
        "SPX010", planned(model, "gpt2", on="a100:2x8", mesh="data=2,fsdp=8", layout="hsdp")
    ),
    "no stages": Near("SPX011", planned(model, "gpt2", on="a100:8", layout="fsdp")),
    "planned gathers": Near("SPX012", reported(wide, on="h100:8", layout="fsdp", moved=(PLANNED,))),
    "8 blocks in a scan": Near(
        "SPX013", planned(model, "gpt-nano", on="v5p:2x2x2", layout="data", sizes={"num_layers": 8})
    ),
    "85 % of the memory": Near("SPX014", tight(wide, 0.85, on="a100:8", layout="data")),
    "90 % of the memory, as compiled": Near("SPX014", reported(wide, on="h100:8", layout="data", peak=0.9)),
    "a sharded optimizer state": Near("SPX015", planned(model, "gpt2-xl", on="v5e:2x4", layout="zero1")),
    "an MLP that XLA partitions well": Near("SPX016", zoo_compiled("mlp", layout="fsdp", inputs_only=True)),
    "an unplanned gather of a parameter, not an activation": Near(
        "SPX016", reported(wide, on="h100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor", moved=(GATHER,))
    ),
    "bfloat16": Near("SPX017", planned(wide, 1024, 1024, 4096, jnp.bfloat16, on="h100:8", layout="data")),
    "float32 on matrix units that round to bfloat16": Near(
        "SPX017", planned(model, "gpt-nano", 64, None, on="v5e:2x4", layout="data")
    ),
    "a host that takes 10 % of the step": Near("SPX018", profiled(host=0.05)),
    "batches that arrive in time": Near("SPX019", profiled(input_wait=0.01)),
    "batch and experts on one axis, resharded in between": Near(
        "SPX020", planned(model, "moe-nano", on="h100:8", mesh="data=1,expert=8", layout="expert")
    ),
    "a loss and its accuracy": Near("SPX021", learner("ordinary", on="a100:8")),
    "a head frozen by `wrt`": Near("SPX022", learner("frozen head", on="a100:8")),
    "a loss of the batch and of fixed inputs": Near("SPX023", learner("both inputs", on="a100:8")),
    "fixed random features": Near("SPX024", learner("fixed features", on="a100:8")),
    "an unused head outside `wrt`": Near("SPX025", learner("frozen head", on="a100:8")),
    "a kernel on rows of the batch": Near("SPX026", learner("kernel on rows", on="a100:8")),
    "a Pallas kernel on the weights": Near("SPX026", learner("kernel on weights", on="a100:8")),
}  # fmt: skip
