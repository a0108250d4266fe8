"""Programs as the compilers for TPUs and GPUs write them, stored for machines without these compilers.

To update them, with libtpu or the CUDA plugin installed: python tests/stored.py
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from flax import nnx

import spanax
from spanax.check.compilers.compile import compile_for
from spanax.check.compilers.lowered_step import lower
from spanax.check.compilers.target import install_command, target_of

# The stored programs name the lines of `Block`: they stay where they are.
FOLDER = Path(__file__).parent / "data" / "compiled"


@dataclass(frozen=True)
class Case:
    """One stored program: its target, and its shardings there."""

    on: str
    layout: str
    mesh: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.on.replace(':', '-')}-{self.layout}.pb.gz"

    @property
    def cluster(self) -> spanax.Cluster:
        return spanax.cluster(self.on)

    def plan(self, program: spanax.Program) -> spanax.Plan:
        return spanax.plan(program, self.cluster, layout=self.layout, mesh=self.mesh)


CASES = [
    Case("v5e:2x4", "fsdp", "fsdp=8"),
    Case("v5p:2x2x2", "fsdp+tensor", "fsdp=4,model=2"),
    Case("v5e:2x2:2", "hsdp", "data=2,fsdp=4"),
    Case("h100:8", "fsdp+tensor", "fsdp=4,model=2"),
]


class Block(nnx.Module):
    """A layer of the smallest model that has all there is to read."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(256, 1024, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(1024, 256, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(x)))


class Model(nnx.Module):
    """Three scanned layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = spanax.Stack(Block, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


def program() -> spanax.Program:
    """The one program of all stored cases."""
    return spanax.trace(
        build=Model,
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((2048, 256), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
        compute_dtype="bfloat16",
    )


def main() -> None:
    """Compile every case whose compiler is there."""
    # Paths that say nothing of the machine they were written on.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", "^.*/(?=tests/|site-packages/|src/spanax/)")
    traced = program()
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        target = target_of(case.cluster)
        if line := install_command(target.platform):
            print(f"{case.path.name}: left as it is; {line}")
            continue
        plan = case.plan(traced)
        compiled = compile_for(target, lower(traced, plan, target.platform), plan.mesh)
        case.path.write_bytes(gzip.compress(compiled.module, 9, mtime=0))
        print(f"{case.path.name}: {case.path.stat().st_size} bytes, {compiled.memory}")


if __name__ == "__main__":
    main()
