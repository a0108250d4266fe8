"""Examples and descriptions of commands for `--help`, colors, and a check of flags that several commands share."""

import inspect
import os
import shlex
from collections.abc import Sequence
from typing import Any, TextIO

from spanax.errors import MissingError, UnknownNameError

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "spanax train gpt-nano                            # 8 simulated devices, no download",
        "spanax plan llama3-8b --on h100:8                # layouts ranked by predicted step time; no devices",
        "spanax launch local --processes 2 -- train gpt-nano  # several processes under a supervisor",
        "spanax launch local --processes 2 -- python train.py # ... and any program",
    ),
    "train": (
        "spanax train gpt-nano --steps 20",
        "spanax train gpt2 --mesh fsdp=4,model=2 --data my_texts/ --output-dir runs/a",
        "spanax train gpt2 --output-dir runs/a --resume --mesh fsdp=8",
        "spanax train mine.py:workload --output-dir runs/a --resume --accept-changed-model",
        "spanax train mine.py:workload --layout fsdp --config settings.toml",
    ),
    "plan": (
        "spanax plan gpt3-175b --on a100-80gb:8x8 --global-batch-size 512",
        "spanax plan gpt2 --on cpu:8 --out plan.json",
        "spanax plan gpt2 --on h100:8 --html layouts.html",
        "spanax plan llama3-8b --on h100:8 --solve-for batch",
        "spanax plan llama3-8b --on h100:8 --generate --dtype bfloat16",
        "spanax plan llama3-8b --on h100:32 --tokens 300B --budget-hours 500",
        "spanax plan gpt2-xl --on h100:8,v5e:4x4 --global-batch-size 64 --tokens 300B --price h100=2.5",
        "spanax plan gpt2 --on h100:8 --calibrate runs/a --out-cluster mine.toml",
    ),
    "check": (
        "spanax check gpt-nano --on cpu:8 --layout fsdp --collectives",
        "spanax check gpt2-xl --on v5e:4x4 --layout fsdp --global-batch-size 16 --fail-on warning",
        "spanax check gpt-nano --on cpu:8 --layout tensor --parity",
    ),
    "generate": (
        'spanax generate runs/a --prompt "def main"',
        'spanax generate weights/llama --chat --prompt "Why is the sky blue?" --temperature 0.7 --top-p 0.9',
        "spanax generate runs/a --prompts prompts.txt > samples.jsonl",
    ),
    "evaluate": (
        "spanax evaluate runs/a --tasks tasks.jsonl",
        "spanax evaluate weights/llama --tasks tasks.jsonl --chat --limit 100 --json > results.jsonl",
    ),
    "models": ("spanax models", "spanax models llama"),
    "axes": ("spanax axes gpt2", "spanax axes mine.py:workload --json"),
    "probe": ("spanax probe --out mine.toml", "spanax plan gpt2 --on mine.toml"),
    "compare": (
        "spanax compare gpt-nano --steps 10",
        "spanax compare gpt-nano --mesh fsdp=4,model=2",
        "spanax compare gpt-nano --top 4",
    ),
    "inspect": (
        "spanax inspect plan.json",
        "spanax inspect runs/a --leaf embed --svg embed.svg",
        "spanax inspect runs/a --schedule",
    ),
    "checkpoint": ("spanax checkpoint show runs/a", "spanax checkpoint verify runs/a"),
    "report": ("spanax report runs/a", "spanax report runs/a -o report.html"),
    "import": ("spanax import gpt2-hf/ --as gpt2 --output-dir weights/gpt2", "spanax train weights/gpt2 --mesh fsdp=8"),
    "export": ("spanax export runs/a --as gpt2 --output-dir for_transformers",),
    "export-rules": ("spanax export-rules gpt2 --layout fsdp+tensor --mesh fsdp=4,model=2",),
    "doctor": ("spanax doctor", "spanax doctor --output-dir /shared/runs --hosts 10.0.0.7:9911"),
    "launch": (
        "spanax launch local --processes 2 --devices-per-process 4 -- train gpt-nano --output-dir runs/two",
        "spanax launch local --processes 2 --devices-per-process 4 -- python train.py --lr 3e-4",
    ),
    "launch local": (
        "spanax launch local --processes 2 --devices-per-process 4 -- train gpt-nano --output-dir runs/two",
        "spanax launch local -- train gpt2 --output-dir runs/a",
        "spanax launch local --processes 2 --logs logs/a --restarts 5 -- python train.py --lr 3e-4",
    ),
    "launch slurm": (
        "spanax launch slurm --hosts 4 --time 24:00:00 -- train gpt2 --output-dir runs/a",
        "spanax launch slurm --hosts 4 --logs runs/b -- python train.py --lr 3e-4",
    ),
    "launch workers": ("spanax launch workers -- train gpt2 --output-dir runs/a",),
}
"""Example command lines by command; those of all commands under the empty name."""


SAME_FLAGS: dict[str, str] = {
    "lr": "learning-rate",
    "num-warmup-steps": "warmup-steps",
    "gradient-clip-val": "max-grad-norm",
    "ema-decay": "ema",
    "max-steps": "steps",
    "max-train-steps": "steps",
    "num-train-steps": "steps",
    "num-train-epochs": "num-epochs",
    "max-epochs": "num-epochs",
    "eval-steps": "eval-every",
    "eval-interval": "eval-every",
    "save-steps": "save-every",
    "checkpoint-period": "save-every",
    "save-total-limit": "keep-last",
    "logging-steps": "log-every",
    "log-every-n-steps": "log-every",
    "config-file": "config",
}
"""Flags of Hugging Face, accelerate, Lightning, MaxText and Levanter -> those of `spanax train` that mean the same."""

_BATCH = "--global-batch-size N, the examples of a step over all devices"
_MICROBATCHES = "--microbatches N, the parts of --global-batch-size over which gradients are accumulated"
_DTYPE = "--dtype bfloat16, float16 or float32; parameters keep the dtype of the model"
_RESUME = "--output-dir runs/NAME --resume, the run folder"
_PROCESSES = "spanax launch local --processes N -- train ..."
_HOSTS = "spanax launch slurm --hosts N -- train ..., or spanax launch workers on each host"
_FOLDER = "--output-dir runs/NAME, the run folder, which contains checkpoints/"
_DATA = "--data PATH, a file, a folder or a pattern"
_REMAT = "--remat full, or dots"

OTHER_FLAGS: dict[str, str] = {
    "per-device-batch-size": _BATCH,
    "per-device-train-batch-size": _BATCH,
    "train-batch-size": _BATCH,
    "batch-size": _BATCH,
    "gradient-accumulation-steps": _MICROBATCHES,
    "accumulate-grad-batches": _MICROBATCHES,
    "mixed-precision": _DTYPE,
    "precision": _DTYPE,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "max-seq-length": "--seq-len N",
    "max-target-length": "--seq-len N",
    "block-size": "--seq-len N",
    "optim": "--optimizer adamw, sgd, lion, adafactor or muon",
    "opt-type": "--optimizer adamw, sgd, lion, adafactor or muon",
    "lr-scheduler-type": "--schedule cosine, linear or constant",
    "warmup-ratio": "--warmup-steps N",
    "nproc-per-node": _PROCESSES,
    "num-processes": _PROCESSES,
    "nnodes": _HOSTS,
    "num-nodes": _HOSTS,
    "num-machines": _HOSTS,
    "accelerator": "JAX_PLATFORMS=cuda, tpu or cpu before the command; --devices N is their number",
    "strategy": "--layout fsdp, or another layout; by default Spanax chooses it",
    "fsdp": "--layout fsdp",
    "deepspeed": "--layout fsdp, zero1 or zero2",
    "tensor-parallel-size": "--mesh model=N",
    "pipeline-parallel-size": "--mesh pipe=N",
    "ici-data-parallelism": "--mesh data=N",
    "ici-fsdp-parallelism": "--mesh fsdp=N",
    "ici-tensor-parallelism": "--mesh model=N",
    "ici-context-parallelism": "--mesh context=N",
    "ici-expert-parallelism": "--mesh expert=N",
    "ici-pipeline-parallelism": "--mesh pipe=N",
    "dcn-data-parallelism": "--mesh data=N,fsdp=M, where the first axis is over the slices or nodes",
    "dcn-fsdp-parallelism": "--mesh fsdp=N, whose axes are over the slices or nodes first",
    "checkpoint-dir": _FOLDER,
    "base-output-directory": _FOLDER,
    "default-root-dir": _FOLDER,
    "run-name": _FOLDER,
    "resume-from": _RESUME,
    "resume-from-checkpoint": _RESUME,
    "ckpt-path": _RESUME,
    "load-parameters-path": "--init CHECKPOINT",
    "model": "its name as the first word: spanax train gpt2 --steps 100",
    "model-name": "its name as the first word: spanax train gpt2 --steps 100",
    "model-name-or-path": "its name as the first word, or a folder of spanax import: spanax train gpt2 --steps 100",
    "train-file": _DATA,
    "dataset": _DATA,
    "dataset-name": _DATA,
    "dataset-path": _DATA,
    "gradient-checkpointing": _REMAT,
    "remat-policy": _REMAT,
    "attn-implementation": "--attention auto, flash or plain",
    "report-to": "--track tensorboard, or wandb",
    "logger": "--track tensorboard, or wandb",
}
"""Flags of those and of torchrun that no command has, and what to write instead."""


def parse_flags(kind: Any, name: str, argv: Sequence[str], **options: Any) -> Any:
    """Returns the flags of a command, as an instance of the dataclass `kind`; `options` are those of `tyro.cli`.

    Raises:
      SpanaxError: a flag is one of another tool.
      SystemExit: the arguments cannot be parsed, or request help.
    """
    import tyro

    words = {"prog": f"spanax {name}", "description": described(kind, name)} | options
    # `None` is no value of an optional flag, typed or in the help.
    return tyro.cli(kind, args=translated(argv, name), config=(tyro.conf.DisallowNone,), **words)


def translated(argv: Sequence[str], name: str) -> list[str]:
    """Returns arguments with the flags of Spanax for the `SAME_FLAGS` of other tools.

    Raises:
      UnknownNameError: a flag is one of `OTHER_FLAGS`.

    Example:
      >>> translated(["gpt2", "--max_steps=5", "--lr", "1e-4"], "train")
      ['gpt2', '--steps=5', '--learning-rate', '1e-4']
    """
    words = []
    for word in argv:
        written, equals, value = word.partition("=")
        known = written.removeprefix("--").replace("_", "-") if written.startswith("--") else ""
        if known in OTHER_FLAGS and name.partition(" ")[0] in ("train", "plan", "check", "compare", "launch"):
            raise UnknownNameError(f"{name} has no flag '{written}'.", fix=OTHER_FLAGS[known])
        words.append(f"--{SAME_FLAGS[known]}{equals}{value}" if known in SAME_FLAGS else word)
    return words


def resume_command(folder: str | os.PathLike[str], steps: int | None = None) -> str:
    """Returns the shell command that resumes a run; with `steps`, up to that number of steps.

    Example:
      >>> resume_command("runs/first try", 20)
      "spanax train --output-dir 'runs/first try' --resume --steps 20"
    """
    path = os.fspath(folder)
    out = [f"--output-dir={path}"] if path.startswith("-") else ["--output-dir", path]
    return shlex.join(["spanax", "train", *out, "--resume", *([] if steps is None else ["--steps", str(steps)])])


def described(subject: object, name: str) -> str:
    """Returns the description of a command's help: a summary, and examples.

    Args:
      subject: the summary, or the class of the flags, whose docstring is used.
      name: the command, such as `launch local`.

    Example:
      >>> print(described("Look at axes.", "axes"))
      Look at axes.
      <BLANKLINE>
        spanax axes gpt2
        spanax axes mine.py:workload --json
    """
    text = subject if isinstance(subject, str) else (inspect.getdoc(subject) or "").partition("\n\nAttributes:")[0]
    return "\n".join([text, "", *(f"  {example}" for example in EXAMPLES.get(name, ()))]).rstrip()


def wants_colors(*streams: TextIO) -> bool:
    """Whether to print colors: on terminals that support them, unless NO_COLOR is set."""
    is_supported = os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return is_supported and all(stream.isatty() for stream in streams)


def flag(name: str) -> str:
    """Returns the flag of a field.

    Example:
      >>> flag("target_mfu")
      '--target-mfu'
    """
    return f"--{name.replace('_', '-')}"


def require(command: str, workload: str, on: str, devices: str) -> None:
    """Raises SpanaxError if the workload or the devices are missing; `devices` are those of the suggested command."""
    if not workload:
        raise MissingError(f"spanax {command} needs a workload.", fix=f"spanax {command} gpt2 --on {devices}")
    if not on:
        raise MissingError(f"spanax {command} needs the devices.", fix=f"spanax {command} {workload} --on {devices}")
