"""Common sharding mistakes, each with the lint code that must be reported and what it must mention."""

from typing import NamedTuple

import programs
from lint.cases import (
    Make,
    compiled,
    learner,
    listed_gpt,
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
from spanax.check.hlo.collectives import Collective
from spanax.plan.plan import Schedule


class Mistake(NamedTuple):
    """`about` is part of the path or of the message."""

    code: str
    about: str
    make: Make


def stages(count: int, microbatches: int, chunks: int = 1) -> Schedule:
    pipeline = "interleaved" if chunks > 1 else "1f1b"
    return Schedule(num_stages=count, microbatches=microbatches, num_chunks=chunks, pipeline=pipeline)


SHORT = {"seq_len": 2048}
GATHER = Collective(
    "all-gather", "model", "bf16", "bf16[1024,4096]", 8 << 20, 12, 2, "all-gather.7",
    "jit(step)/jvp()/dot_general", "/home/me/model.py:31", tensors=("up.kernel",),
)  # fmt: skip
EXCHANGE = Collective(
    "all-to-all", "model", "bf16", "bf16[512,1024]", 4 << 20, 12, 2, "all-to-all.3",
    "jit(step)/jvp()/transpose", "/home/me/model.py:44",
)  # fmt: skip

MISTAKES: dict[str, Mistake] = {
    # Large replicated arrays
    "a head of 1,021 columns stored over 8": Mistake(
        "SPX001", "head.kernel", planned(wide, 1024, 1021, on="a100:8", layout="fsdp")
    ),
    # Idle mesh axes
    "a mesh axis that the layout does not use": Mistake(
        "SPX002", "'y' (2)", planned(model, "gpt2", on="v5e:2x4", mesh="x=4,y=2", layout=own_layout())
    ),
    # Redundant computation
    "grouped queries partitioned by XLA": Mistake(
        "SPX003", "its share", compiled(programs.zoo_program, "llama", layout="fsdp", inputs_only=True)
    ),
    "attention computed twice by XLA": Mistake(
        "SPX003", "2.00 times", reported(wide, on="v5p:2x2x2", layout="data", flops=2.0)
    ),
    # Losses that do not train
    "an accuracy as loss": Mistake("SPX021", "nothing is trained", learner("accuracy", on="a100:8")),
    "a constant as loss": Mistake("SPX021", "all 4 parameters", learner("constant", on="a100:8")),
    "a stop_gradient before the head": Mistake("SPX022", "up.bias", learner("cut", on="a100:8")),
    "a loss of fixed inputs": Mistake("SPX023", "batch", learner("fixed inputs", on="a100:8")),
    "nnx.Rngs(0) in the loss": Mistake("SPX024", "same random numbers", learner("fixed mask", on="a100:8")),
    "a head that the loss does not use": Mistake("SPX025", "head.bias", learner("unused head", on="a100:8")),
    # Kernels that no compiler can partition
    "a Pallas kernel on the batch": Mistake("SPX026", "8 devices gather its operands", learner("kernel", on="a100:8")),
    "a kernel along the batch": Mistake("SPX026", "`cumsum`", learner("kernel along the batch", on="a100:8")),
    # Optimizer state that is not sharded
    "moments replicated by jit(tx.init)": Mistake(
        "SPX004", "mu.embed", planned(model, "gpt2", on="h100:8", mesh="x=8", layout=own_layout(optimizer=()))
    ),
    "replicated gradients and moments, sharded parameters": Mistake(
        "SPX004", "up.kernel",
        planned(wide, 1024, 1024, 8192, on="a100:8", mesh="x=8", layout=own_layout(optimizer=(), gradients=())),
    ),
    # Annotations without effect
    "two pins for one mesh axis": Mistake(
        "SPX005", "'embed' is pinned",
        planned(model, "gpt2", on="a100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor",
                pin={"embed": "model", "mlp": "model"}),
    ),
    "names of another framework's mesh": Mistake(
        "SPX005", "annotated with 'tp'", planned(named, "dp", "tp", on="v5e:2x4", layout="fsdp")
    ),
    "one name misspelt": Mistake(
        "SPX005", "annotated with 'modle'", planned(named, "fsdp", "modle", on="a100:8", layout="fsdp")
    ),
    "sequence parallelism of 63 tokens": Mistake(
        "SPX005", "shard the sequence",
        planned(model, "gpt-nano", on="a100:8", mesh="fsdp=2,model=4", layout="fsdp+tensor+seq", sizes={"seq_len": 63}),
    ),
    "sequence parallelism of a model without a sequence": Mistake(
        "SPX005", "shard the sequence",
        planned(model, "resnet-nano", on="a100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor+seq"),
    ),
    # Sizes that do not divide
    "a vocabulary of 50,257 over 4": Mistake(
        "SPX006", "vocab (50257)", planned(model, "gpt2", on="v5e:2x4", mesh="fsdp=2,model=4", layout="fsdp+tensor")
    ),
    "12 heads over 8": Mistake("SPX006", "heads (12)", planned(model, "gpt2", on="h100:8", layout="tensor")),
    "25 heads over 2": Mistake(
        "SPX006", "heads (25)", planned(model, "gpt2-xl", on="v5p:2x2x2", mesh="fsdp=4,model=2", layout="fsdp+tensor")
    ),
    # Pipeline bubbles
    "two microbatches on four stages": Mistake(
        "SPX007", "2 microbatches",
        planned(model, "gpt-nano", 16, on="a100:4", mesh="data=1", layout="data", schedule=stages(4, 2)),
    ),
    "an interleaved schedule with few microbatches": Mistake(
        "SPX007", "4 microbatches",
        planned(model, "gpt2", on="h100:8", mesh="data=2", layout="data", schedule=stages(4, 4, 3)),
    ),
    # Slow links
    "FSDP across nodes with a small batch": Mistake(
        "SPX008", "'fsdp' (64)", planned(model, "gpt-nano", on="a100:8x8", layout="fsdp")
    ),
    "a tensor axis larger than a node": Mistake(
        "SPX008", "'model' (16)", planned(model, "gpt2-medium", on="a100:2x8", layout="tensor")
    ),
    # Sharding a state that fits
    "FSDP of a matrix that fits": Mistake("SPX009", "fsdp on", planned(wide, on="a100:8", layout="fsdp")),
    "expert parallelism of experts of 100 kB": Mistake(
        "SPX009", "expert on", planned(model, "moe-nano", on="v5e:2x4", mesh="data=1,expert=8", layout="expert")
    ),
    # Sharding across nodes where HSDP is faster
    "FSDP over four nodes, in eight microbatches": Mistake(
        "SPX010", "fsdp on fsdp=32",
        planned(wide, 4096, 4096, 8192, on="a100:4x8", mesh="fsdp=32", schedule=Schedule(microbatches=8)),
    ),
    "HSDP with its axes swapped: sharded across nodes, replicated inside": Mistake(
        "SPX010", "hsdp on fsdp=2,data=8",
        planned(model, "gpt2", on="a100:2x8", mesh="fsdp=2,data=8", layout="hsdp"),
    ),
    # Unnecessary pipeline stages
    "a pipeline inside one node": Mistake(
        "SPX011", "longer than",
        planned(model, "gpt2", on="a100:8", mesh="data=2", layout="data", schedule=stages(4, 32)),
    ),
    # Tensors that XLA replicates
    "inputs sharded over a 2D mesh, activations partitioned by XLA": Mistake(
        "SPX012", "models/gpt.py",
        compiled(programs.zoo_program, "gpt", mesh="fsdp=4,model=2", layout="fsdp+tensor+seq", inputs_only=True),
    ),
    "a tensor-parallel kernel gathered in each layer": Mistake(
        "SPX012", "up.kernel",
        reported(wide, on="h100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor", moved=(GATHER,)),
    ),
    # Long compile times
    "16 layers in a list": Mistake("SPX013", "layers", planned(tall, 16, on="a100:8", layout="data")),
    "8 blocks of a GPT in a list": Mistake("SPX013", "blocks", planned(listed_gpt, 8, on="v5p:2x2x2", layout="data")),
    # Memory
    "no room for fragmentation": Mistake("SPX014", "leaves less", tight(wide, 1.03, on="a100:8", layout="data")),
    "twice the available memory": Mistake("SPX014", "does not fit", tight(wide, 4.0, on="v5e:2x4", layout="data")),
    "temporaries that only the compiler reports": Mistake(
        "SPX014", "the compiler", reported(wide, on="h100:8", layout="data", peak=1.1)
    ),
    "optimizer state ignored, 16 GB": Mistake(
        "SPX015", "with the optimizer", planned(model, "gpt2-xl", on="v5e:2x4", layout="data")
    ),
    # Unplanned activation transfers
    "FSDP by its inputs alone": Mistake(
        "SPX016", "models/gpt.py", compiled(programs.zoo_program, "gpt", layout="fsdp", inputs_only=True)
    ),
    "heads resharded between two layouts": Mistake(
        "SPX016", "/home/me/model.py:44",
        reported(wide, on="a100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor", moved=(EXCHANGE,)),
    ),
    # Precision
    "float32 on matrix units": Mistake(
        "SPX017", "float32", planned(wide, 1024, 1024, 4096, "float32", on="h100:8", layout="data")
    ),
    # Idle devices
    "metrics fetched after every short step": Mistake("SPX018", "host", profiled(host=0.3, idle=0.05)),
    "devices started one after the other": Mistake("SPX018", "while another device works", profiled(idle=0.2)),
    "images decoded in one thread": Mistake("SPX019", "waiting for a batch", profiled(input_wait=0.2)),
    # Batch and weights on one axis
    "batch and MLP on one axis": Mistake(
        "SPX020", "the batch and mlp",
        planned(model, "gpt2", on="v5e:2x4", mesh="x=8", layout=own_layout(("batch", "mlp"))),
    ),
    "heads pinned to the axis of the batch": Mistake(
        "SPX020", "the batch and heads",
        planned(model, "gpt-nano", on="v5p:2x2x2", layout="fsdp", pin={"heads": "fsdp"}),
    ),
}  # fmt: skip
