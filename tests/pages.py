"""Plans, runs and checks for the tests of pages, and a reader that holds a page against the rules of HTML."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from spanax.check.finding import Finding, Severity
from spanax.check.hlo.collectives import Collective
from spanax.check.report import Figures, Report
from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import Layout
from spanax.plan.plan import Plan, Prediction, Schedule
from spanax.plan.sharding.placement import Placement
from spanax.sealed import sealed
from spanax.train.record.events import Events

BEGAN = 1_700_000_000.0
VOID = {"meta", "input", "br", "img", "link"}


def leaf(path: str, kind: str = "param", shape: tuple[int, ...] = (64, 256), reason: str = "") -> Placement:
    """An array of an fsdp=4,model=2 mesh: its first dim over fsdp, its last over model."""
    spec = (("fsdp",), *[()] * (len(shape) - 2), ("model",)) if len(shape) > 1 else ((),) * len(shape)
    ways = [{"fsdp": 4, "model": 2}.get(by[0], 1) if by else 1 for by in spec]
    local = tuple(size // count for size, count in zip(shape, ways, strict=True))
    num_bytes = 4
    for size in local:
        num_bytes *= size
    axes = ("embed", *["hidden"] * (len(shape) - 2), "mlp")[: len(shape)]
    return Placement(path, shape, "float32", kind, axes, spec, local, num_bytes, reason)


def a_plan(num_blocks: int = 3, *, paths: tuple[str, ...] = (), has_price: bool = True) -> Plan:
    """A plan over 8 devices with arrays of distinct sizes, and a pipeline schedule."""
    names = [f"{place}.{index}" for index in range(num_blocks) for place in ("up", "down")]
    leaves = [
        leaf(f"block_{name.replace('.', '_')}.kernel", "param", (64 + 4 * index, 256))
        for index, name in enumerate(names)
    ]
    leaves += [leaf(f"blocks.{index}.scale", "param", (64,), "too small to split") for index in range(4)]
    leaves += [leaf(path) for path in paths]
    leaves += [replace(leaf, path=f"opt_state.0.mu.{leaf.path}", kind="optimizer") for leaf in leaves]
    price = Prediction(
        "h100:8", 0.02, {"matmuls": 0.012, "memory": 0.005, "weights between devices": 0.003},
        {"parameters": 3 << 20, "optimizer": 6 << 20, "activations": 30 << 20}, 80 << 20, 1e12, 0.41,
        {"fsdp": {"all-gather": 5_000_000, "reduce-scatter": 1_000_000}, "model": {"all-reduce": 2_500_000}},
        {leaves[0].path: {"fsdp": {"all-gather": 65_536, "reduce-scatter": 8_192}}},
    )  # fmt: skip
    return Plan(
        fingerprint="0123456789abcdef",
        mesh=MeshShape.of("fsdp=4,model=2"),
        layout=Layout("fsdp+tensor", (("fsdp", ("batch",)), ("model", ("mlp",))), ("fsdp",), ("fsdp",), ("fsdp",)),
        pins=(),
        leaves=tuple(leaves),
        batch=(Placement("inputs", (32, 64), "int32", "batch", ("batch", "seq"), (("fsdp",), ()), (8, 64), 2048, ""),),
        why="the state does not fit on a device; all of it is stored over fsdp=4",
        schedule=Schedule(remat="full", microbatches=4, num_stages=2),
        price=price if has_price else None,
    )


def a_certificate() -> Report:
    """A check with findings of every weight, collectives, and a plan."""
    collectives = tuple(
        Collective(
            "all-gather", "fsdp", "f32", f"f32[{64 * index},256]", 65_536 * index, 12, 4, f"all-gather.{index}",
            "dot_general", "/home/a/model.py:63", tensors=("block_up_0.kernel",),
        )
        for index in range(6, 0, -1)
    )  # fmt: skip
    report = Report(
        3, "h100:8", "fsdp+tensor", "fsdp=4,model=2", True, "the compiler",
        Figures(9 << 20, 39 << 20, 1e12, {"fsdp": {"all-gather": 5_000_000}}),
        Figures(9 << 20, 41 << 20, 1.01e12, {"fsdp": {"all-gather": 5_100_000}, "model": {"all-reduce": 64}}),
        limit_bytes=80 << 20, collectives=collectives, seconds=2.5,
    )  # fmt: skip
    findings = (
        Finding("SPX001", Severity.ERROR, "embed", "`embed` lies whole on 8 devices.", "layout fsdp", 4096),
        Finding("SPX009", Severity.WARNING, "", "another layout takes half as long."),
        Finding("SPX018", Severity.INFO, "", "nothing to worry about."),
    )
    return replace(report, findings=findings, plan=a_plan())


def a_run(folder: Path, plan: Plan, num_steps: int = 60) -> Path:
    """A run that died once, with its curves, its plan and a profile."""
    (folder / "profile").mkdir(parents=True)
    spent = [{"start": 4, "compile": 6, "step": 18, "save": 2}, {"restart": 8, "recomputed": 6, "step": 11, "data": 3}]
    reported = [
        (4, 0, "rank 0", {"event": "begin", "step": 0, "devices": 8, "mesh": {"fsdp": 4, "model": 2}}),
        (30, 0, "rank 0", {"event": "ledger", "step": 30, "seconds": spent[0]}),
        (42, 0, "supervisor", {"event": "died", "what": "it was killed.", "rank": 1, "words": "hm\nouch"}),
        (55, 1, "rank 0", {"event": "begin", "step": 20, "devices": 8, "mesh": {"fsdp": 4, "model": 2}}),
        (75, 1, "rank 0", {"event": "ledger", "step": num_steps, "seconds": spent[1]}),
        (75, 1, "rank 0", {"event": "end", "step": num_steps}),
    ]
    for after, attempt, by, event in reported:
        wall = {"wall_seconds": sum(event["seconds"].values())} if "seconds" in event else {}
        Events(folder, by, attempt).append(**({"time": BEGAN + after} | event | wall))
    (folder / "config.toml").write_text(sealed('workload = "gpt-nano"\n'))
    (folder / "plan.json").write_text(plan.to_json())
    lines = [{"event": "start", "step": 0}]
    for step in range(1, num_steps + 1):
        loss = 6.0 / step**0.4 + 0.1 * (step % 7 == 0)
        rate = 100.0 if step == 1 else 9000.0 + 40 * (step % 11)
        seconds = 12.0 if step == 1 else 0.025
        lines.append({"event": "step", "step": step, "loss": loss, "tokens_per_second": rate, "step_seconds": seconds})
        if step % 20 == 0:
            lines.append({"event": "eval", "step": step, "val_loss": loss + 0.2})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        {"step": step, "prompt": prompt, "text": f"{prompt}\n of {step}", "tokens": [1, 2]}
        for step in (20, num_steps)
        for prompt in ("one", "two")
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    seconds = {"compute": 0.014, "communication": 0.006, "idle": 0.001, "host": 0.003, "input wait": 0.001}
    profile = {"steps": 6, "devices": 8, "step_seconds": 0.025, "seconds": seconds, "communication": {"fsdp": 0.006}}
    (folder / "profile" / "summary.json").write_text(json.dumps(profile | {"operations": {}}))
    return folder


class Read(HTMLParser):
    """A page as it was read: its elements, its texts, and what is wrong with it."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.problems: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is left open" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(set(names)) < len(names):
            self.problems.append(f"<{tag}> has an attribute twice")
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes another element")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All that is to be read."""
        return " ".join(" ".join(self.texts).split())
