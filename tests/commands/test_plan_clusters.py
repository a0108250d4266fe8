"""`spanax plan` on several clusters: one table, the largest batch that fits, the cost of a run, and mistakes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import spanax
import zoo
from programs import workload
from requested import with_flags
from sampling import sampled
from spanax.commands.plan.answer import answer
from spanax.commands.plan.flags import PlanCommand
from spanax.errors import SpanaxError
from spanax.trace.workload import Workload

NANO = with_flags(PlanCommand("gpt-nano", ("h100:8", "8xH100,a100:8")), global_batch_size=16)
FSDP = with_flags(NANO, layout="fsdp", remat="none")
"""The same of one layout: what is no question of the search takes a quarter of the time."""


class Block(nnx.Module):
    """The smallest layer of which remat recomputes something."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class Tagger(nnx.Module):
    """A class for each token: a model of tokens and layers with few operations."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(256, 128, rngs=rngs), nnx.Linear(128, 16, rngs=rngs)
        self.blocks = spanax.Stack(Block, 4, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.embed(tokens)))


def tagged(model: Any, batch: dict[str, Any]) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"]).mean()


def load(batch_size: int | None = None, **_: Any) -> Workload:
    tokens = jax.ShapeDtypeStruct((batch_size or 16, 64), "int32")
    return Workload(build=Tagger, batch={"inputs": tokens, "targets": tokens}, loss=tagged, vocab_size=256)


def load_mlp(batch_size: int | None = None, **_: Any) -> Workload:
    return Workload(build=zoo.MLP, batch=zoo.VECTORS(batch_size or 16), loss=zoo.squared_error)


def small(folder: Path, like: str, memory: str) -> str:
    """A cluster file of a chip with little memory."""
    file = folder / f"{like}-{memory.partition(' ')[0]}.toml"
    file.write_text(f'like = "{like}"\nusable_memory = "{memory}"\ndollars_per_hour = 2\n')
    return str(file)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The workloads that a test traces."""
    calls = list[Any]()
    trace = Workload.trace

    def counted(self: Workload, **options: Any) -> Any:
        calls.append(self)
        return trace(self, **options)

    monkeypatch.setattr(Workload, "trace", counted)
    return calls


def test_clusters_are_answered_in_one_table_from_one_trace(tmp_path: Path, traced: list[Any]) -> None:
    names = (*NANO.on, "h100:12", "nothing:8", small(tmp_path, "l4", "2 MiB") + ":8")
    page = tmp_path / "page.html"
    asked = dataclasses.replace(FSDP, on=names, tokens=300e9, price=("h100=2.9",), html=page)
    reply = answer(asked, load)
    rows = reply.data["clusters"]
    assert reply.exit_code == 0 and len(traced) == 1
    assert [row["on"] for row in rows] == ["h100:8", "8xH100", "a100:8", "h100:12", "nothing:8", names[-1]]
    single = answer(with_flags(FSDP, on=("h100:8",), tokens=300e9, price=("h100=2.9",)), load).data
    assert rows[0]["best"] == rows[1]["best"] == single["best"]
    assert rows[0]["cost_dollars"] == pytest.approx(single["budget"]["cost_dollars"])
    assert rows[0]["device_hours"] == pytest.approx(single["budget"]["device_hours"])
    assert rows[0]["cost_dollars"] == pytest.approx(2.9 * rows[0]["device_hours"])
    assert rows[2]["cost_dollars"] is None and rows[2]["device_hours"] > 0
    assert [row["problem"] is None for row in rows] == [True] * 3 + [False] * 3
    problems = (("h100:12", "12 devices of h100"), ("nothing:8", "unknown chip"), (names[-1], "nothing fits"))
    for name, problem in problems:
        assert any(line.startswith(name) and problem in line for line in reply.text.splitlines())
        assert problem in page.read_text()
    assert "it fits with" in rows[5]["problem"] and "dollars per device-hour: h100 2.9" in reply.text
    assert answer(dataclasses.replace(FSDP, on=names[2:4]), load).exit_code == 2


@pytest.mark.parametrize(
    "like, memory, layout", sampled([("h100", "38 MiB", "fsdp"), ("v5e", "16 MiB", None)], [("h100", "38 MiB", "fsdp")])
)
def test_the_largest_batch_is_that_of_a_plan_at_this_batch(
    tmp_path: Path, like: str, memory: str, layout: str | None
) -> None:
    plain = with_flags(NANO, attention="plain", loss_chunks="1")
    on, of_layout = f"{small(tmp_path, like, memory)}:8", with_flags(plain, layout=layout)
    rows = answer(with_flags(of_layout, on=(on, "nothing:8")), load).data["clusters"]
    size = rows[0]["largest_batch"]["batch"]
    assert size % 8 == 0 and rows[0]["largest_batch"]["microbatches"] == 1
    exact: Any = {"on": (on,), "microbatches": 1, "offload": "none", "pad": "none"}
    assert answer(with_flags(of_layout, global_batch_size=size, **exact), load).exit_code == 0
    assert answer(with_flags(of_layout, global_batch_size=size + 8, **exact), load).exit_code == 2
    assert answer(with_flags(of_layout, on=(on,), solve_for="batch"), load).data["answer"] == size


def test_a_batch_that_the_devices_do_not_divide_bounds_no_larger_one(tmp_path: Path) -> None:
    on = (f"{small(tmp_path, 'h100', '38 MiB')}:8", "nothing:8")
    few, many = (answer(with_flags(FSDP, on=on, global_batch_size=size), load).data["clusters"][0] for size in (4, 16))
    assert few["largest_batch"]["batch"] == many["largest_batch"]["batch"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"price": ("h100=cheap",)}, "is not a device and its dollars"),
        ({"price": ("2.9",)}, "is not a device and its dollars"),
        ({"price": ("h100=-1",)}, "price of h100 is -1"),
        ({"price": ("h100=nan",)}, "price of h100 is nan"),
        ({"price": ("b200=4",)}, "no cluster has it"),
        ({"price": ("h1000=4",)}, "unknown chip 'h1000'"),
        ({"price": ("h100=1", "h100=2")}, "two prices of h100"),
        ({"out": Path("plan.json")}, "--out is for one cluster"),
        ({"tokens": 1.0, "examples": 1.0}, "contradicts"),
    ],
)
def test_mistakes_are_errors_before_anything_is_traced(
    changes: dict[str, Any], message: str, traced: list[Any]
) -> None:
    with pytest.raises(SpanaxError, match=message):
        answer(dataclasses.replace(NANO, **changes))
    assert not traced


def test_a_model_without_tokens_counts_examples() -> None:
    images = with_flags(FSDP, on=("h100:8", "nothing:8"), global_batch_size=64)
    reply = answer(dataclasses.replace(images, tokens=1e9), load_mlp)
    assert "has no tokens" in reply.text and "device-hours " not in reply.text.splitlines()[0]
    counted = answer(dataclasses.replace(images, examples=1e9), load_mlp).data["clusters"][0]
    assert counted["device_hours"] == pytest.approx(8 * 1e9 / 64 * counted["best"]["step_seconds"] / 3600)
    with pytest.raises(SpanaxError, match="has no tokens"):
        answer(dataclasses.replace(images, on=("h100:8",), tokens=1e9), load_mlp)


def test_a_list_of_clusters_in_python(tmp_path: Path) -> None:
    program = load().trace(learning_rate=1e-3, num_steps=1)
    on = f"{small(tmp_path, 'h100', '1 GiB')}:8"
    quotes = spanax.plan(program, on=["h100:8", on, "h100:12"], attention="plain", loss_chunks=1).priced(
        {"h100": 3.0}, tokens=1e9
    )
    assert [quote.plan is None for quote in quotes] == [False, False, True]
    assert quotes[0].plan == spanax.plan(program, "h100:8", attention="plain", loss_chunks=1)
    assert [quote.dollars_per_hour for quote in quotes] == [3.0, 2.0, None]
    assert "fill nodes" in str(quotes) and "cost $" in str(quotes) and "<iframe" in quotes._repr_html_()


@pytest.mark.parametrize("arguments", [{}, {"cluster": "h100:8", "on": ["h100:8"]}, {"on": "h100:8"}])
def test_either_one_cluster_or_several(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpanaxError, match="either `cluster`, or a list"):
        spanax.plan(workload("gpt-nano", batch_size=16), **arguments)
