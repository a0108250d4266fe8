"""Mistakes that people make, each with the code that must be said of it, and about what."""

from typing import NamedTuple

import programs
from lint.made import (
    Make,
    compiled,
    learner,
    listed_gpt,
    model,
    named,
    own_layout,
    planned,
    tagger,
    tall,
    tight,
    told,
    watched,
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
    # What lies whole
    "a head of 1,021 columns stored over 8": Mistake(
        "SPX001", "head.kernel", planned(wide, 1024, 1021, on="a100:8", layout="fsdp")
    ),
    "word vectors of 300 numbers for 50,257 words stored over 8": Mistake(
        "SPX001", "embed.embedding", planned(tagger, on="v5e:2x4", layout="fsdp")
    ),
    # Axes without work
    "a mesh axis that no layout uses": Mistake(
        "SPX002", "'y' (2)", planned(model, "gpt2", on="v5e:2x4", mesh="x=4,y=2", layout=own_layout())
    ),
    "replicas that get the same examples": Mistake(
        "SPX002", "'replica' (2)", planned(model, "moe-nano", on="h100:8", mesh="replica=2,x=4", layout=own_layout())
    ),
    # Work that others do as well
    "grouped queries left to the compiler": Mistake(
        "SPX003", "its share", compiled(programs.zoo_program, "llama", layout="fsdp", inputs_only=True)
    ),
    "attention computed twice by the compiler": Mistake(
        "SPX003", "2.00 times", told(wide, on="v5p:2x2x2", layout="data", flops=2.0)
    ),
    # Losses that do not train
    "an accuracy for a loss": Mistake("SPX021", "nothing is trained", learner("accuracy", on="a100:8")),
    "a constant for a loss": Mistake("SPX021", "all 4 parameters", learner("constant", on="a100:8")),
    "a stop_gradient before the head": Mistake("SPX022", "up.bias", learner("cut", on="a100:8")),
    "a loss of fixed inputs": Mistake("SPX023", "batch", learner("fixed inputs", on="a100:8")),
    "nnx.Rngs(0) in the loss": Mistake("SPX024", "same random numbers", learner("fixed mask", on="a100:8")),
    "a head that the loss leaves out": Mistake("SPX025", "head.bias", learner("unused head", on="a100:8")),
    # ZeRO that is none
    "moments made whole by jit(tx.init)": Mistake(
        "SPX004", "mu.embed", planned(model, "gpt2", on="h100:8", mesh="x=8", layout=own_layout(optimizer=()))
    ),
    "gradients and moments whole, parameters split": Mistake(
        "SPX004", "up.kernel", planned(wide, on="a100:8", mesh="x=8", layout=own_layout(optimizer=(), gradients=()))
    ),
    "moments of a vision transformer whole": Mistake(
        "SPX004", "kernel", planned(model, "vit-nano", on="v5p:2x2x2", mesh="x=8", layout=own_layout(optimizer=()))
    ),
    # Wishes that do not come true
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
        "SPX005", "split the sequence",
        planned(model, "gpt-nano", on="a100:8", mesh="fsdp=2,model=4", layout="fsdp+tensor+seq", sizes={"seq_len": 63}),
    ),
    "sequence parallelism of a model without a sequence": Mistake(
        "SPX005", "split the sequence",
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
    "8 keys and values over 16": Mistake(
        "SPX006", "heads (8)", planned(model, "llama3-8b", on="a100:2x8", layout="tensor", sizes=SHORT)
    ),
    "4 keys and values of a mixture over 8": Mistake(
        "SPX006", "heads (4)", planned(model, "moe-nano", on="h100:8", layout="tensor")
    ),
    # Pipelines that wait
    "two microbatches on four stages": Mistake(
        "SPX007", "2 microbatches",
        planned(model, "gpt-nano", 16, on="a100:4", mesh="data=1", layout="data", schedule=stages(4, 2)),
    ),
    "half as many microbatches as stages": Mistake(
        "SPX007", "2 microbatches",
        planned(model, "gpt2", on="v5e:2x4", mesh="fsdp=2", layout="fsdp", schedule=stages(4, 2)),
    ),
    "as many microbatches as stages": Mistake(
        "SPX007", "4 microbatches",
        planned(model, "gpt-nano", 16, on="a100:8", mesh="data=2", layout="data", schedule=stages(4, 4)),
    ),
    "an interleaved schedule with few microbatches": Mistake(
        "SPX007", "4 microbatches",
        planned(model, "gpt2", on="h100:8", mesh="data=2", layout="data", schedule=stages(4, 4, 3)),
    ),
    # Slow links
    "FSDP over Ethernet": Mistake(
        "SPX008", "weights between devices", planned(model, "gpt2", 16, on="l4:16", layout="fsdp")
    ),
    "FSDP between slices of TPUs": Mistake(
        "SPX008", "weights between devices", planned(model, "gpt2-medium", 16, on="v5e:2x4:2", layout="fsdp")
    ),
    "FSDP across nodes with a small batch": Mistake(
        "SPX008", "'fsdp' (64)", planned(wide, 4096, 4096, 64, on="a100:8x8", layout="fsdp")
    ),
    "a tensor axis larger than a node": Mistake(
        "SPX008", "'model' (16)", planned(model, "gpt2-medium", on="a100:2x8", layout="tensor")
    ),
    "the tensor axis first in the mesh, across nodes": Mistake(
        "SPX008", "'model' (8)",
        planned(model, "gpt2-medium", on="a100:2x8", mesh="model=8,fsdp=2", layout="fsdp+tensor"),
    ),
    # Splitting what fits
    "FSDP of a matrix that fits": Mistake("SPX009", "fsdp on", planned(wide, 512, 512, on="a100:8", layout="fsdp")),
    "tensor parallelism of convolutions": Mistake(
        "SPX009", "tensor on", planned(model, "resnet-nano", on="a100:8", layout="tensor")
    ),
    "context parallelism of 64 tokens": Mistake(
        "SPX009", "context on", planned(model, "llama-nano", on="h100:8", mesh="data=2,context=4", layout="context")
    ),
    "expert parallelism of experts of 100 kB": Mistake(
        "SPX009", "expert on", planned(model, "moe-nano", on="v5e:2x4", mesh="data=1,expert=8", layout="expert")
    ),
    "tensor parallelism of a vision transformer on a laptop": Mistake(
        "SPX009", "tensor on", planned(model, "vit-nano", on="cpu:8", layout="tensor")
    ),
    # Copies where splitting crosses nodes
    "FSDP over four nodes, in eight microbatches": Mistake(
        "SPX010", "fsdp on fsdp=32",
        planned(wide, 4096, 4096, 8192, on="a100:4x8", mesh="fsdp=32", schedule=Schedule(microbatches=8)),
    ),
    "HSDP turned round: split across nodes, copied inside": Mistake(
        "SPX010", "hsdp on fsdp=2,data=8",
        planned(model, "gpt2", on="a100:2x8", mesh="fsdp=2,data=8", layout="hsdp"),
    ),
    "FSDP across slices where copies fit": Mistake(
        "SPX010", "fsdp=16", planned(model, "gpt2-medium", 16, on="v5e:2x4:2", layout="fsdp")
    ),
    # Stages without need
    "stages of what fits on one device": Mistake(
        "SPX011", "longer than",
        planned(model, "gpt-nano", on="a100:8", mesh="data=4", layout="data", schedule=stages(2, 8)),
    ),
    "a pipeline inside one node": Mistake(
        "SPX011", "longer than",
        planned(model, "gpt2", on="a100:8", mesh="data=2", layout="data", schedule=stages(4, 32)),
    ),
    # What the compiler makes whole
    "inputs of a 2D mesh sharded, activations left to the compiler": Mistake(
        "SPX012", "models/gpt.py",
        compiled(programs.zoo_program, "gpt", mesh="fsdp=4,model=2", layout="fsdp+tensor+seq", inputs_only=True),
    ),
    "a tensor-parallel kernel gathered in each layer": Mistake(
        "SPX012", "up.kernel",
        told(wide, on="h100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor", moved=(GATHER,)),
    ),
    # Programs that compile for long
    "16 layers in a list": Mistake("SPX013", "layers", planned(tall, 16, on="a100:8", layout="data")),
    "8 blocks of a GPT in a list": Mistake("SPX013", "blocks", planned(listed_gpt, 8, on="v5p:2x2x2", layout="data")),
    # Memory
    "no room for fragments": Mistake("SPX014", "leaves less", tight(wide, 0.97, on="a100:8", layout="data")),
    "twice what there is": Mistake("SPX014", "does not fit", tight(wide, 2.0, on="v5e:2x4", layout="data")),
    "ZeRO-1 where FSDP is needed": Mistake(
        "SPX014", "does not fit", planned(model, "gpt2-xl", on="v5e:2x4", layout="zero1")
    ),
    "temporaries that only the compiler knows": Mistake(
        "SPX014", "the compiler", told(wide, on="h100:8", layout="data", peak=1.1)
    ),
    "the optimizer forgotten, 16 GB": Mistake(
        "SPX015", "with the optimizer", planned(model, "gpt2-xl", on="v5e:2x4", layout="data")
    ),
    "the optimizer forgotten, 80 GB": Mistake(
        "SPX015", "with the optimizer", planned(model, "llama3-8b", on="a100:8", layout="data", sizes=SHORT)
    ),
    # Activations that move without a plan
    "FSDP by its inputs alone": Mistake(
        "SPX016", "models/gpt.py", compiled(programs.zoo_program, "gpt", layout="fsdp", inputs_only=True)
    ),
    "heads transposed between two layouts": Mistake(
        "SPX016", "/home/me/model.py:44",
        told(wide, on="a100:8", mesh="fsdp=4,model=2", layout="fsdp+tensor", moved=(EXCHANGE,)),
    ),
    # Precision
    "float32 on matrix units": Mistake(
        "SPX017", "float32", planned(wide, 1024, 1024, 4096, "float32", on="h100:8", layout="data")
    ),
    "convolutions in float32": Mistake(
        "SPX017", "float32", planned(model, "resnet-nano", 64, "float32", on="a100:8", layout="data")
    ),
    # What the devices wait for
    "metrics fetched after every little step": Mistake("SPX018", "host", watched(host=0.3, idle=0.05)),
    "devices started one after the other": Mistake("SPX018", "while another works", watched(idle=0.2)),
    "images decoded in one thread": Mistake("SPX019", "waiting for a batch", watched(input_wait=0.2)),
    # Two things on one axis
    "batch and MLP on one axis": Mistake(
        "SPX020", "the batch and mlp",
        planned(model, "gpt2", on="v5e:2x4", mesh="x=8", layout=own_layout(("batch", "mlp"))),
    ),
    "batch and outputs on one axis": Mistake(
        "SPX020", "the batch and features",
        planned(wide, on="a100:8", mesh="x=8", layout=own_layout(("batch", "features"))),
    ),
    "heads pinned to the axis of the batch": Mistake(
        "SPX020", "the batch and heads",
        planned(model, "gpt-nano", on="v5p:2x2x2", layout="fsdp", pin={"heads": "fsdp"}),
    ),
}  # fmt: skip
