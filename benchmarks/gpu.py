"""One GPU: Spanax beside hand-written JAX and compiled PyTorch (as nanoGPT has it), steps taken in turn in one run.

GPTs of 124M, 350M and 1B parameters (the last as deep and wide as Llama 3.2 1B, its heads too), bf16 over float32
weights, AdamW, attention by cuDNN in JAX and by PyTorch's own choice; layers in a list, and scanned beside by hand
scanned. MFU counts 6 N + 12 L d S FLOPs a token (PaLM, appendix B: N parameters that multiply, the tied embedding once;
attention in full) over the GPU's dense bf16 peak. Needs a GPU, JAX for CUDA, and PyTorch for CUDA here or in
.venv-peers; without a GPU it ends with 1. A peer that did other work gets no ratio, and the whole ends with 1.

    python benchmarks/gpu.py [--sizes gpt2 gpt2-medium 1b] [--rounds 20] [--json FILE]
    python benchmarks/gpu.py --tiny       # anywhere: that it runs, nothing to be learnt of speed
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from peers.__main__ import Peer, measure, quartiles, rounds  # noqa: E402
from peers.alike import differences  # noqa: E402
from peers.shape import Shape  # noqa: E402

HAND, OURS, TORCH = "hand-written JAX", "spanax", "PyTorch compiled"
GROUPS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        HAND: ("by_hand.py", "--flash"),
        OURS: ("with_spanax.py", "--flash"),
        TORCH: ("with_torch.py", "--mode", "compiled"),
    },
    {
        f"{HAND}, scanned": ("by_hand.py", "--flash", "--scan"),
        f"{OURS}, scanned": ("with_spanax.py", "--flash", "--scan"),
    },
)
"""Peers that take their steps in turn, the first of each the reference: five models of 1B do not fit on one GPU."""

SIZES = {
    "gpt2": Shape(12, 12, 768, 1024, 50304, 32, dtype="bfloat16"),
    "gpt2-medium": Shape(24, 16, 1024, 1024, 50304, 16, dtype="bfloat16"),
    "1b": Shape(16, 32, 2048, 2048, 50304, 8, dtype="bfloat16"),
    "tiny": Shape(2, 2, 32, 32, 128, 4, dtype="bfloat16"),
}

LOSS_TOLERANCE = 2e-2
"""Relative, of any step: sums of 16-bit products in another order, and AdamW on them."""


def model_flops(shape: Shape) -> float:
    """FLOPs of a step by the convention above.

    Example:
      >>> round(model_flops(SIZES["gpt2"]) / SIZES["gpt2"].num_tokens / 1e6)  # 6 x 124M, and attention
      855
    """
    weights = 12 * shape.num_layers * shape.embed_dim**2 + shape.vocab_size * shape.embed_dim
    return shape.num_tokens * (6.0 * weights + 12.0 * shape.num_layers * shape.embed_dim * shape.seq_len)


def accelerator() -> str | None:
    """The kind of GPU that JAX sees, asked in a process of its own, which lets go of it again."""
    code = "import jax; d = jax.devices()[0]; print(d.device_kind if d.platform == 'gpu' else '')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return told.stdout.strip().splitlines()[-1] if told.returncode == 0 and told.stdout.strip() else None


def rows_of(size: str, shape: Shape, peers: Sequence[Peer], peak_flops: float | None) -> list[dict[str, Any]]:
    """One line a peer; ratios are medians over rounds to the first one's step in the same round."""
    rows = []
    for one in peers:
        low, median, high = quartiles(one, peers[0])
        seconds = statistics.median(one.seconds)
        rows.append({
            "size": size, "peer": one.name, "ratio": median, "low": low, "high": high, "step_seconds": seconds,
            "tokens_per_second": shape.num_tokens / seconds, "device": one.facts.get("device"),
            "mfu": model_flops(shape) / seconds / peak_flops if peak_flops else None,
            "attention": one.facts.get("attention", "its own"), "versions": one.facts["versions"],
            "to_first_step_seconds": one.facts["to_first_step_seconds"],
        })  # fmt: skip
    return rows


def other_work(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """In what peers did not do the same work as the first of them, by their names."""
    return differences(facts, loss_tolerance=LOSS_TOLERANCE)


def table(rows: Sequence[Mapping[str, Any]], absent: Mapping[str, str]) -> str:
    """The rows in Markdown."""
    lines = ["| size | peer | ratio (middle half) | ms a step | tokens/s | MFU, % |", "|---|---|---|---|---|---|"]
    for one in rows:
        mfu = "" if one["mfu"] is None else f"{100 * one['mfu']:.1f}"
        lines.append(
            f"| {one['size']} | {one['peer']} | {one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f}) "
            f"| {1e3 * one['step_seconds']:.1f} | {one['tokens_per_second']:,.0f} | {mfu} |"
        )
    return "\n".join([*lines, *(f"| | {name} | {why} | | | |" for name, why in absent.items())])


def chosen(group: Mapping[str, tuple[str, ...]], only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Those of a group whose names have one of these parts, beside their reference; nothing where none has."""
    reference, *others = group
    wanted = [name for name in others if not only or any(part in name for part in only)]
    return {name: group[name] for name in (reference, *wanted) if wanted}


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["gpt2", "gpt2-medium", "1b"], choices=[*SIZES])
    parser.add_argument("--rounds", type=rounds, default=20)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names, beside the hand-written one")
    parser.add_argument("--tiny", action="store_true", help="a toy, on whatever is here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kind = accelerator()
    if kind is None and not args.tiny:
        sys.exit("no GPU is here; --tiny runs anywhere")
    # Several peers share the GPU: none may take all of its memory at once.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    groups = [chosen(group, args.only) for group in GROUPS]
    all_rows, all_absent, differ = [], dict[str, str](), list[str]()
    for size in ["tiny"] if args.tiny else args.sizes:
        shape = SIZES[size]
        flags = [word for name, value in asdict(shape).items() for word in (f"--{name.replace('_', '-')}", str(value))]
        measured, absent = list[list[Peer]](), dict[str, str]()
        for group in filter(None, groups):
            peers, without = measure([*group], flags, args.rounds, group)
            for one in peers:
                one.end()
            if not peers or peers[0].name != next(iter(group)):
                sys.exit(f"{next(iter(group))} did not run: {without}")
            measured.append(peers)
            absent |= without
        others = other_work({one.name: one.facts | {"losses": one.losses} for peers in measured for one in peers})
        absent |= {name: f"other work: {what}" for name, what in others.items()}
        differ += [f"{size}, {name}" for name in others]
        for reference, *peers in measured:
            if reference.name in others:
                absent |= {one.name: f"nothing to hold it beside: {reference.name} did other work" for one in peers}
            else:
                alike = [one for one in peers if one.name not in others]
                all_rows += rows_of(size, shape, [reference, *alike], peak_of(kind))
        all_absent |= {f"{size}, {name}": why for name, why in absent.items()}
    print(table(all_rows, all_absent))
    print(f"\n{kind or platform.processor() or 'cpu'}, {args.rounds} rounds, {all_rows[0]['versions']}")
    if args.json:
        args.json.write_text(json.dumps({"rows": all_rows, "absent": all_absent}, indent=1) + "\n")
    if differ:
        sys.exit(f"not the same work as {HAND}: {'; '.join(differ)}")


def peak_of(kind: str | None) -> float | None:
    """Dense bf16 FLOPs a second of a GPU, as the catalogue has them."""
    from spanax.hardware.chips import catalogue

    found = [chip.peak_flops.get("bf16") for chip in catalogue().values() if kind in chip.device_kinds]
    return found[0] if found else None


if __name__ == "__main__":
    main()
