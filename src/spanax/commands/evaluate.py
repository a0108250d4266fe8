"""`spanax evaluate`: the model of a run or imported weights, on the examples of a file."""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.documents import json_line
from spanax.train.flags import check_numbers

if TYPE_CHECKING:
    from spanax.train.data.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class EvaluateCommand:
    """Evaluate the model of a run, or imported weights, on the examples of a file.

    A terminal gets a table of the tasks; a pipe gets one JSON object for each example, and one with the table.

    Attributes:
      checkpoint: a run folder, a folder of checkpoints, or the output of spanax import.
      tasks: a file with one example per line, as a JSON object.
      limit: the number of examples of each task. Default: all.
      seed: seed of the draw for --limit.
      chat: put each context and prompt into the chat template of the run, or of the imported tokenizer.
      workload: the workload of the checkpoint, if its folder does not record it.
      layout: name of a layout. Default: that of --mesh.
      mesh: sizes of the mesh axes, such as fsdp=4,model=2. Default: the first device.
      json: print JSON lines in a terminal too.
      traceback: show the full traceback of an error.
    """

    checkpoint: Positional[Path]
    tasks: Path
    limit: int | None = None
    seed: int = 0
    chat: bool = False
    workload: str | None = None
    layout: str | None = None
    mesh: str | None = None
    json: bool = False
    traceback: bool = False


def answer(command: EvaluateCommand) -> Answer:
    """Returns the results.

    Raises:
      SpanaxError: an argument is invalid, or an example does not fit the model.
      DataError: the checkpoint or the file of tasks cannot be read.
    """
    check_numbers(command)
    from spanax.interop.tasks import evaluate, read_examples, summary
    from spanax.processes.devices import devices
    from spanax.train.compilation_cache import enable_compilation_cache

    examples = read_examples(command.tasks)
    if command.limit is not None:
        examples = _drawn(examples, command.limit, command.seed)
    enable_compilation_cache()
    devices(None)
    from spanax.interop.language_model import LanguageModel
    from spanax.interop.loaded_model import load_model
    from spanax.train.data.text.chat_template import required

    saved = load_model(command.checkpoint, workload=command.workload, layout=command.layout, mesh=command.mesh)
    model = LanguageModel.of(saved, is_chat=command.chat)
    if command.chat:
        template = required(saved.chat_template, str(command.checkpoint), "leave --chat out")
        examples = {name: _asked(each, template) for name, each in examples.items()}
    results = evaluate(model, examples)
    rows = summary(results)
    num_cut = sum(result["num_cut"] > 0 for result in results)
    if sys.stdout.isatty() and not command.json:
        cut = f"; {num_cut} cut from the left to {model.length} positions" if num_cut else ""
        return Answer(f"{_table(rows)}\n{len(results)} examples, step {saved.step}{cut}")
    last = {"summary": rows, "num_examples": len(results), "num_cut": num_cut, "step": saved.step}
    return Answer("\n".join(map(json_line, [*results, last])))


def _drawn(examples: Mapping[str, Any], limit: int, seed: int) -> dict[str, Any]:
    """Returns at most so many examples of each task, in their order."""
    generator = random.Random(seed)
    kept: set[str] = set()
    for task in dict.fromkeys(each.task for each in examples.values()):
        own = [name for name, each in examples.items() if each.task == task]
        kept.update(generator.sample(own, min(limit, len(own))))
    return {name: each for name, each in examples.items() if name in kept}


def _asked(example: Any, template: "ChatTemplate") -> Any:
    """Returns an example whose context or prompt is a message to a chat model."""
    name = "prompt" if hasattr(example, "prompt") else "context"
    return replace(example, **{name: template.prompt(getattr(example, name))})


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    from spanax.show.tables import table_text

    cells = []
    for row in rows:
        numbers = ["" if number is None else f"{number:.4f}" for number in (row["value"], row["standard_error"])]
        cells.append((row["task"], str(row["num_examples"]), row["metric"], *numbers))
    return table_text(("task", "examples", "metric", "value", "standard error"), cells)
