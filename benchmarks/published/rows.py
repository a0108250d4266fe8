"""Published training runs: the rows of any folder of CSV files, read into one type, and what each measured.

The columns are those of `tests/data/truth/README.md`; an empty cell is not stated. A row that cannot be read raises
`Skipped` with the reason, never anything else.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from published.shapes import completed
from published.source import source_key

SHAPE = ("n_layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len", "n_devices")
OPTIONAL = (
    "n_kv_heads", "head_dim", "num_experts", "top_k", "expert_d_ff", "shared_d_ff", "global_batch_seqs",
    "microbatch_seqs",
)  # fmt: skip
MEASURED = ("step_time_s", "tokens_per_s_per_device", "tflops_per_device", "mfu_pct")
SAME = 0.03
"""Two FLOP conventions that differ by less give the same step time, for our purpose."""


class Skipped(ValueError):
    """A row that cannot be expressed; the message is the reason, the same for all alike."""


@dataclass(frozen=True)
class Row:
    """One run. Degrees are 1 where nothing is stated; `batch`, `microbatch` are sequences; None: not stated."""

    id: str
    file: str
    text: dict[str, str]
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    vocab_size: int
    seq_len: int
    num_devices: int
    tensor: int
    stages: int
    chunks: int
    context: int
    expert: int
    data: int | None
    fsdp: int | None
    zero_stage: int | None
    accumulated: int | None
    batch: int | None
    microbatch: int | None
    params: float | None

    @property
    def batch_shards(self) -> int:
        """Returns the number of shards of the batch."""
        return self.num_devices // (self.tensor * self.stages * self.context)

    @property
    def source(self) -> str:
        """Returns the key of the document or repository that the row is from."""
        return source_key(self.text.get("source", ""), self.file)

    @property
    def cells(self) -> list[str]:
        """Returns what the row states of the model and its software, in lower case."""
        return [self.text.get(key, "").lower() for key in ("framework", "model", "precision", "remat", "notes")]

    def states(self, *words: str) -> bool:
        """Returns whether any of the patterns is in the row's cells."""
        return any(re.search(word, text) for word in words for text in self.cells)


def files(folder: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Name and rows of every CSV file of a folder, in order of name."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8", errors="replace") as lines:
            texts = [
                {key: (value or "").strip() for key, value in row.items() if key and not isinstance(value, list)}
                for row in csv.DictReader(lines)
            ]
        yield path.stem, texts


def is_runs(rows: list[dict[str, str]]) -> bool:
    """Whether a file holds training runs."""
    return bool(rows) and {"device", "n_devices"} <= set(rows[0]) and bool(set(MEASURED) & set(rows[0]))


def read(file: str, text: dict[str, str], number_in_file: int) -> Row:
    """Returns one row of a file; its number names it where it has no id.

    Raises:
      Skipped: what a model or a mesh needs is missing or no number.
    """
    text = completed(text)
    missing = [key for key in SHAPE if whole(text, key) is None]
    if missing:
        raise Skipped(f"not stated: {', '.join(missing)}" if len(missing) < 3 else "the model's shape is not stated")
    size = {key: whole(text, key) or 0 for key in SHAPE}
    if min(size.values()) < 1:
        raise Skipped("a size is not positive")
    optional = {key: whole(text, key) for key in OPTIONAL}
    if any(value is not None and value < (0 if key == "shared_d_ff" else 1) for key, value in optional.items()):
        raise Skipped("a size is not positive")
    heads, kv_heads = size["n_heads"], optional["n_kv_heads"] or size["n_heads"]
    if heads % kv_heads:
        raise Skipped("the heads of keys do not divide those of queries")
    if (optional["top_k"] or 1) > (optional["num_experts"] or 1):
        raise Skipped("more experts of a token than there are")
    degrees = {
        key: whole(text, key) for key in ("tp", "pp", "vpp", "cp", "ep", "dp", "fsdp", "zero_stage", "grad_accum")
    }
    if any(value is not None and value < 1 for key, value in degrees.items() if key != "zero_stage"):
        raise Skipped("a degree is not positive")
    tensor, stages, context = (degrees[key] or 1 for key in ("tp", "pp", "cp"))
    if size["n_devices"] % (tensor * stages * context):
        raise Skipped("the degrees do not divide the devices")
    if heads % tensor:
        raise Skipped("the tensor degree does not divide the heads")
    return Row(
        id=text.get("id") or f"{file}-{number_in_file:04d}",
        file=file,
        text=text,
        num_layers=size["n_layers"],
        embed_dim=size["d_model"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_dim=size["d_ff"],
        vocab_size=size["vocab"],
        seq_len=size["seq_len"],
        num_devices=size["n_devices"],
        tensor=tensor,
        stages=stages,
        chunks=degrees["vpp"] or 1,
        context=context,
        expert=degrees["ep"] or 1,
        data=degrees["dp"],
        fsdp=degrees["fsdp"],
        zero_stage=degrees["zero_stage"],
        accumulated=degrees["grad_accum"],
        batch=optional["global_batch_seqs"],
        microbatch=optional["microbatch_seqs"],
        params=None if number(text, "params_b") is None else 1e9 * (number(text, "params_b") or 0.0),
    )


def number(text: dict[str, str], key: str) -> float | None:
    """A cell as a finite number; None where it is empty or something else."""
    try:
        value = float(text.get(key, "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def whole(text: dict[str, str], key: str) -> int | None:
    """A cell as a whole number; None where it is none."""
    value = number(text, key)
    return int(value) if value is not None and value == int(value) else None


def step_seconds(row: Row, batch: int, peak_flops: float, matmul_params: float) -> float:
    """What a row measured, as seconds of one step of `batch` sequences.

    The step time if it is stated; else from tokens per second and device; else from FLOP/s per device or MFU, where
    the row's convention names what it counts.

    Args:
      row: the run.
      batch: sequences of one step.
      peak_flops: of one device, what an MFU is of.
      matmul_params: parameters of the layers and of the output matrix, without an embedding of its own.

    Raises:
      Skipped: nothing of it is stated, or not what counts as a FLOP.
    """
    seconds, rate = number(row.text, "step_time_s"), number(row.text, "tokens_per_s_per_device")
    if seconds is not None:
        return _positive(seconds)
    if rate is not None:
        return batch * row.seq_len / (_positive(rate) * row.num_devices)
    achieved = number(row.text, "tflops_per_device")
    if achieved is None and (share := number(row.text, "mfu_pct")) is not None:
        achieved = share / 100 * peak_flops / 1e12
    if achieved is None:
        raise Skipped("nothing of a step's time was measured")
    return step_flops(row, batch, matmul_params) / (_positive(achieved) * 1e12 * row.num_devices)


def step_flops(row: Row, batch: int, matmul_params: float) -> float:
    """FLOPs of a step as the row's convention counts them.

    Model FLOPs are 6 for each parameter and token, and 12 L d s for each token for attention, half if counted causally.

    Source: PaLM (arXiv 2204.02311) appendix B; hardware FLOPs, Narayanan et al. (arXiv 2104.04473), appendix.
    """
    stated = row.text.get("flops_convention", "").lower()
    tokens = batch * row.seq_len
    h, s, layers, vocab = row.embed_dim, row.seq_len, row.num_layers, row.vocab_size
    if "96*b*s*l*h" in stated or ("hardware" in stated and row.states("full")):
        return 96.0 * tokens * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    if not re.search(r"6n|model flops|model_flops|mfu", stated) or "hfu" in stated or "hardware" in stated:
        raise Skipped("what counts as a FLOP is not clear")
    all_scores = 12.0 * layers * h * s
    either = [6.0 * matmul_params + all_scores / 2, 6.0 * matmul_params + all_scores]
    if re.search(r"non-?causal|not halved", stated):
        return tokens * either[1]
    if re.search(r"causal|halved", stated):
        return tokens * either[0]
    if either[1] / either[0] - 1 > SAME:
        raise Skipped("what counts as a FLOP is not clear")
    return tokens * sum(either) / 2


def _positive(value: float) -> float:
    if value <= 0:
        raise Skipped("a measured value is not positive")
    return value
