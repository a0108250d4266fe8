"""`spanax generate`: text after prompts, by the model of a run or by imported weights."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from spanax.commands.answer import Answer
from spanax.documents import json_line
from spanax.errors import MissingError, RangeError
from spanax.printable import printable_lines
from spanax.train.data.text.prompts import read_prompts

if TYPE_CHECKING:
    from spanax.interop.loaded_model import LoadedModel

NEW_TOKENS = 128
"""The most tokens after a prompt, by default."""


@dataclass(frozen=True)
class GenerateCommand:
    """Generate text with the model of a run, or with imported weights.

    A terminal gets the text, as it is generated; a pipe gets one JSON object for each generation.

    Attributes:
      checkpoint: a run folder, a folder of checkpoints, or the output of spanax import.
      prompt: a prompt; several after one flag.
      prompts: a file with one prompt per line, or - for standard input.
      chat: put each prompt into the chat template of the run, or of the imported tokenizer.
      max_new_tokens: most tokens after each prompt. Default: 128, or fewer if the model has no more
        positions.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw from this many most likely tokens.
      top_p: draw from the fewest most likely tokens whose probabilities sum to this.
      min_p: draw from tokens at least this times as likely as the most likely one.
      repetition_penalty: above 1, makes tokens of the sequence less likely.
      stop: a text that ends a generation; several after one flag. The end-of-text token always does.
      seed: seed of the samples.
      num_samples: generations for each prompt.
      workload: the workload of the checkpoint, if its folder does not record it.
      dtype: dtype of the parameters. Default: as saved.
      layout: name of a layout. Default: that of --mesh.
      mesh: sizes of the mesh axes, such as fsdp=4,model=2. Default: the first device.
      json: print JSON lines in a terminal too.
      traceback: show the full traceback of an error.
    """

    checkpoint: Positional[Path]
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT...")] = ()
    prompts: str | None = None
    chat: bool = False
    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT...")] = ()
    seed: int = 0
    num_samples: int = 1
    workload: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    layout: str | None = None
    mesh: str | None = None
    json: bool = False
    traceback: bool = False


def answer(command: GenerateCommand) -> Answer:
    """Generates, and prints each text.

    Raises:
      SpanaxError: an argument is invalid, or the model cannot generate.
      DataError: the checkpoint or the file of prompts cannot be read.
    """
    texts = _prompts(command)
    from spanax.decoding.sampling import Sampling
    from spanax.processes.devices import devices
    from spanax.train.compilation_cache import enable_compilation_cache

    rules = command.temperature, command.top_k, command.top_p, command.min_p, command.repetition_penalty
    Sampling(*rules).checked()  # before the model is loaded
    enable_compilation_cache()
    devices(None)
    from spanax.interop.loaded_model import load_model
    from spanax.train.data.text.chat_template import required

    saved = load_model(
        command.checkpoint,
        workload=command.workload,
        dtype=command.dtype,
        layout=command.layout,
        mesh=command.mesh,
    )
    prompts = texts
    if command.chat:
        template = required(saved.chat_template, str(command.checkpoint), "leave --chat out")
        prompts = [template.prompt(text) for text in texts]
    is_text = sys.stdout.isatty() and not command.json
    ids = _token_ids(command, saved, prompts)
    options = _options(command, saved, max(map(len, ids)))
    if is_text and len(prompts) * command.num_samples == 1:
        return _streamed(saved, prompts[0], ids, options)
    return _printed(saved, texts, ids, options, is_text=is_text)


def _prompts(command: GenerateCommand) -> list[str]:
    """Returns the prompts of the flags and of the file.

    Raises:
      SpanaxError: there is none.
      DataError: the file cannot be read.
    """
    texts = list(command.prompt)
    if command.prompts is not None:
        texts += read_prompts(command.prompts)
    if not texts:
        raise MissingError("there is no prompt.", fix='--prompt "Once upon a time", or --prompts FILE, or --prompts -')
    return texts


def _token_ids(command: GenerateCommand, saved: "LoadedModel", prompts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of prompts; a chat template writes the begin token itself.

    Raises:
      SpanaxError: the checkpoint has no tokenizer.
    """
    if saved.tokenizer is None:
        raise MissingError(
            f"'{command.checkpoint}' has no tokenizer.", fix="spanax.generate in Python, with token ids as prompts"
        )
    return [saved.tokenizer.encode(prompt, add_special_tokens=not command.chat).ids for prompt in prompts]


def _options(command: GenerateCommand, saved: "LoadedModel", longest: int) -> dict[str, Any]:
    """Returns the options of `spanax.generate` for prompts of at most `longest` tokens.

    Raises:
      SpanaxError: no token could follow a prompt.
    """
    most = command.max_new_tokens
    if most is None:
        most = NEW_TOKENS if saved.length is None else min(NEW_TOKENS, saved.length - longest)
        if most < 1:
            what = f"a prompt has {longest} tokens, and the model has {saved.length} positions."
            raise RangeError(what, fix="a shorter prompt")
    names = (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "num_samples",
    )  # fmt: skip
    options = {name: getattr(command, name) for name in names}
    options["max_new_tokens"] = most
    ends: list[Any] = [] if saved.end_id is None else [saved.end_id]
    if command.chat and saved.chat_template is not None:
        ends += _turn_ends(saved.tokenizer, saved.chat_template.end)
    is_placed = command.layout is not None or command.mesh is not None
    like = saved.forward if is_placed else None
    return options | {"stop": [*command.stop, *ends], "tokenizer": saved.tokenizer, "like": like}


def _turn_ends(tokenizer: Any, text: str) -> list[Any]:
    """Returns the stop for the text after an answer: a token, or the text if the tokenizer can make it."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) == 1:
        return [ids[0]]
    return [text] if text and tokenizer.decode(ids) == text else []


def _printed(
    saved: "LoadedModel", texts: Sequence[str], ids: list[list[int]], options: dict[str, Any], *, is_text: bool
) -> Answer:
    from spanax.decoding.generate import generate

    results = generate(saved.model, ids, **options)
    lines = []
    for index, result in enumerate(results):
        prompt = texts[index // options["num_samples"]]
        if is_text:
            lines.append(f"{prompt}{result.text}\n")
            continue
        lines.append(
            json_line(
                {
                    "prompt": prompt,
                    "text": result.text,
                    "tokens": result.tokens,
                    "log_probabilities": result.log_probabilities,
                    "is_stopped": result.is_stopped,
                    "step": saved.step,
                }
            )
        )
    return Answer("\n".join(lines))


def _streamed(saved: "LoadedModel", prompt: str, ids: list[list[int]], options: dict[str, Any]) -> Answer:
    """Prints one generation as it is generated."""
    from spanax.decoding.generate import generate

    steps = generate(saved.model, ids, stream=True, **options)
    sys.stdout.write(printable_lines(prompt))
    for piece in _pieces(saved, options["stop"], (int(tokens[0]) for tokens in steps)):
        sys.stdout.write(printable_lines(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return Answer()


def _pieces(saved: "LoadedModel", stops: Sequence[Any], tokens: Iterator[int]) -> Iterator[str]:
    """Yields the text of tokens as soon as it is certain: a character may take several, and a stop is not printed."""
    assert saved.tokenizer is not None
    ends = [stop for stop in stops if isinstance(stop, str)]
    longest = max(map(len, ends), default=0)
    ids: list[int] = []
    printed = 0
    for token in tokens:
        if token in stops:
            break
        ids.append(token)
        text = saved.tokenizer.decode(ids)
        if any(text.endswith(end) for end in ends):
            end = next(end for end in ends if text.endswith(end))
            yield text[printed : len(text) - len(end)]
            return
        certain = len(text.rstrip("\ufffd")) - longest
        if certain > printed:
            yield text[printed:certain]
            printed = certain
    yield saved.tokenizer.decode(ids)[printed:]
