"""Evaluation on the examples of a file: likelihoods of continuations, choices, and generated texts."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from spanax.decoding.likelihood import Likelihood
from spanax.documents import MAX_INT, parse_json, read_bytes
from spanax.errors import FileError, first_line
from spanax.interop.language_model import Continuation, LanguageModel
from spanax.schema import Within, parsed

MAX_BYTES = 1 << 30

NewTokens = Annotated[int, Within(1, MAX_INT)]


@dataclass(frozen=True)
class LogLikelihood:
    """How likely a continuation is after a context."""

    task: str
    context: str
    continuation: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The continuations whose likelihoods are computed."""
        return (self.continuation,)


@dataclass(frozen=True)
class MultipleChoice:
    """Which of several continuations is the most likely one after a context."""

    task: str
    context: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer is {self.answer}, and there are {len(self.choices)} choices, from 0")


@dataclass(frozen=True)
class ExactMatch:
    """Whether the most likely text after a prompt is an expected one."""

    task: str
    prompt: str
    expected: tuple[str, ...]
    stop: tuple[str, ...] = ("\n",)
    max_new_tokens: NewTokens = 32


@dataclass(frozen=True)
class FreeText:
    """The most likely text after a prompt, which is not compared."""

    task: str
    prompt: str
    stop: tuple[str, ...]
    max_new_tokens: NewTokens


KINDS: dict[str, Any] = {
    "continuation": LogLikelihood,
    "choices": MultipleChoice,
    "expected": ExactMatch,
    "prompt": FreeText,
}
"""The kinds of examples, by a key that each has and those before do not."""

METRICS = {
    "log_probability": "log_probability",
    "is_greedy": "greedy",
    "is_correct": "accuracy",
    "is_correct_by_bytes": "accuracy_by_bytes",
    "is_match": "exact_match",
}
"""The metrics that are means over examples, by their key in the result of one."""


def read_examples(path: Path) -> dict[str, Any]:
    """Returns the examples of a file with a JSON object on each line, by the name of the file and line.

    Raises:
      DataError: the file cannot be read, or a line is not an example.
    """
    fix = "one JSON object on each line, as in the section Tasks of docs/generate.md"
    try:
        lines = read_bytes(path, max_bytes=MAX_BYTES).decode().split("\n")
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read the tasks of '{path}'.", where=first_line(error), fix=fix) from None
    examples = {}
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                examples[f"{path}:{number}"] = _example(parse_json(line))
        except ValueError as error:
            raise FileError(f"{path}:{number} is not an example.", where=first_line(error), fix=fix) from None
    if not examples:
        raise FileError(f"'{path}' has no example.", fix=fix)
    return examples


def _example(data: Any) -> Any:
    kind = next((KINDS[key] for key in KINDS if isinstance(data, dict) and key in data), None)
    if kind is None:
        raise ValueError(f"it has none of the keys {', '.join(KINDS)}")
    missing = [each.name for each in fields(kind) if each.default is MISSING and each.name not in data]
    if missing:
        raise ValueError(f"it has no '{missing[0]}'")
    for name in ("expected", "stop"):
        if isinstance(data.get(name), str):
            data[name] = [data[name]]
        if "" in (data.get(name) or ()) or (name == "expected" and data.get(name) == []):
            raise ValueError(f"'{name}' is empty")
    return parsed(kind, data, is_strict=False)


def evaluate(model: LanguageModel, examples: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the result of each example.

    Raises:
      SpanaxError: an example has no token, or more than the model has positions.
    """
    asked = {name: each for name, each in examples.items() if isinstance(each, ExactMatch | FreeText)}
    scored = {name: each for name, each in examples.items() if name not in asked}
    pairs = [(each.context, choice) for each in scored.values() for choice in each.choices]
    names = [name for name, each in scored.items() for _ in each.choices]
    likelihoods = iter(model.log_likelihoods(pairs, names))
    records = {name: _scored(each, [*islice(likelihoods, len(each.choices))]) for name, each in scored.items()}
    continuations = model.continued([*asked.values()], [*asked])
    for (name, each), continuation in zip(asked.items(), continuations, strict=True):
        records[name] = _generated(each, continuation)
    return [{"task": each.task, "example": name, **records[name]} for name, each in examples.items()]


def _scored(example: LogLikelihood | MultipleChoice, likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
    numbers = [likelihood.log_probability for likelihood in likelihoods]
    num_cut = max(likelihood.num_cut for likelihood in likelihoods)
    if isinstance(example, MultipleChoice):
        by_bytes = [number / len(choice.encode()) for number, choice in zip(numbers, example.choices, strict=True)]
        return {
            "log_probabilities": numbers,
            "is_correct": numbers.index(max(numbers)) == example.answer,
            "is_correct_by_bytes": by_bytes.index(max(by_bytes)) == example.answer,
            "num_cut": num_cut,
        }
    scored = example.context[len(example.context.rstrip()) :] + example.continuation
    return {
        "log_probability": numbers[0],
        "is_greedy": likelihoods[0].is_greedy,
        "num_tokens": likelihoods[0].num_tokens,
        "num_bytes": len(scored.encode()),
        "num_cut": num_cut,
    }


def _generated(example: ExactMatch | FreeText, continuation: Continuation) -> dict[str, Any]:
    record = {"text": continuation.text, "is_stopped": continuation.is_stopped, "num_cut": continuation.num_cut}
    if isinstance(example, ExactMatch):
        record["is_match"] = continuation.text.strip() in [each.strip() for each in example.expected]
    return record


def summary(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the metrics of each task: the number of examples, the mean over them, and its standard error.

    Perplexities are those of all tokens or bytes together, without an error.

    Example:
      >>> summary([{"task": "a", "is_correct": each} for each in (True, False, True)])[0]["value"]
      0.6666666666666666
    """
    rows = []
    for task in dict.fromkeys(result["task"] for result in results):
        own = [result for result in results if result["task"] == task]
        for key, metric in METRICS.items():
            values = [float(result[key]) for result in own if key in result]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            if values:
                rows.append(_row(task, metric, len(values), statistics.fmean(values), error))
        likely = [result for result in own if "num_tokens" in result]
        for unit in ("token", "byte") if likely else ():
            mean = sum(each["log_probability"] for each in likely) / sum(each[f"num_{unit}s"] for each in likely)
            rows.append(_row(task, f"perplexity_per_{unit}", len(likely), math.exp(-mean)))
        texts = [result for result in own if METRICS.keys().isdisjoint(result)]
        if texts:
            rows.append(_row(task, "text", len(texts)))
    return rows


def _row(
    task: str, metric: str, num_examples: int, value: float | None = None, error: float | None = None
) -> dict[str, Any]:
    return {"task": task, "metric": metric, "num_examples": num_examples, "value": value, "standard_error": error}
