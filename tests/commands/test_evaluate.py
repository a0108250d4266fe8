"""`spanax evaluate` and the model of the harness: results are those of the plain forward pass and of transformers."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

import spanax
from spanax import cli
from spanax.commands.evaluate import _asked, _drawn
from spanax.interop import import_weights
from spanax.interop.harness import SpanaxLM
from spanax.interop.language_model import LanguageModel
from spanax.interop.loaded_model import LoadedModel, load_model
from spanax.interop.tasks import ExactMatch, FreeText, MultipleChoice, evaluate, read_examples, summary
from spanax.train.data.text.chat_template import ChatTemplate
from spanax.train.data.text.tokenizer import begin_ids

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "tests" / "interop" / "weights"
LONG = "if a is not None: return b " * 4

EXAMPLES: list[dict[str, Any]] = [
    {"task": "likely", "context": "import ", "continuation": "os"},
    {"task": "likely", "context": "", "continuation": "def f"},
    {"task": "likely", "context": LONG, "continuation": " else c"},
    {"task": "choices", "context": "while", "choices": [" True:", "x", " not a"], "answer": 1},
    {"task": "choices", "context": "while", "choices": [" True:", "x", " not a"], "answer": 0},
    {"task": "match", "prompt": "x =", "expected": "?", "max_new_tokens": 6, "stop": ["~~"]},
    {"task": "match", "prompt": LONG, "expected": ["?", "?"], "max_new_tokens": 6, "stop": ["~~"]},
    {"task": "text", "prompt": "a", "stop": ["~~"], "max_new_tokens": 6},
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of 32 positions, whose end-of-text token is `!`."""
    folder = tmp_path_factory.mktemp("evaluate")
    shutil.copytree(WEIGHTS / "gpt2", folder / "hf")
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    import_weights(folder / "hf", "gpt2", folder / "weights")
    return folder / "weights"


@pytest.fixture(scope="module")
def saved(weights: Path) -> LoadedModel:
    return load_model(weights)


def ids_of(saved: LoadedModel, text: str) -> list[int]:
    return saved.tokenizer.encode(text, add_special_tokens=False).ids


class Plain:
    """The forward pass of 32 positions, as the model is written."""

    def __init__(self, saved: LoadedModel):
        self.saved = saved
        self.forward = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))

    def numbers(self, ids: list[int]) -> np.ndarray:
        """Log-probabilities after each of at most 32 tokens."""
        return np.asarray(self.forward(self.saved.model, np.array([[*ids, *[0] * (32 - len(ids))]])))[0, : len(ids)]

    def score(self, context: str, continuation: str) -> float:
        before = ids_of(self.saved, context.rstrip())
        after = ids_of(self.saved, context + continuation)[len(before) :]
        read = [*(before or [self.saved.end_id]), *after][-33:]
        return float(self.numbers(read[:-1])[np.arange(len(read) - 1), read[1:]][-len(after) :].sum())

    def greedy(self, prompt: str, count: int) -> str:
        ids = ids_of(self.saved, prompt)[count - 32 :]
        for _ in range(count):
            ids.append(int(self.numbers(ids)[-1].argmax()))
        return self.saved.tokenizer.decode(ids[-count:])


def lines(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    cli.main(["evaluate", *args])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_results_are_those_of_the_forward_pass_on_every_mesh(
    weights: Path,
    saved: LoadedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Plain(saved)
    texts = [plain.greedy(each["prompt"], each["max_new_tokens"]) for each in EXAMPLES[5:]]
    examples = [*EXAMPLES[:5], EXAMPLES[5] | {"expected": f" {texts[0]}"}, *EXAMPLES[6:]]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, examples)))
    with monkeypatch.context() as patch:
        patch.setattr("spanax.interop.loaded_model.load_model", lambda *_, **__: saved)
        *results, last = lines(capsys, str(weights), "--tasks", str(file))

    scores = [plain.score(each["context"], each["continuation"]) for each in EXAMPLES[:3]]
    assert [result["log_probability"] for result in results[:3]] == pytest.approx(scores, rel=1e-5)
    choices = [plain.score("while", choice) for choice in EXAMPLES[3]["choices"]]
    by_bytes = np.array(choices) / [len(choice) for choice in EXAMPLES[3]["choices"]]
    for result, example in zip(results[3:5], EXAMPLES[3:5], strict=True):
        assert result["log_probabilities"] == pytest.approx(choices, rel=1e-5)
        assert result["is_correct"] == (np.argmax(choices) == example["answer"])
        assert result["is_correct_by_bytes"] == (np.argmax(by_bytes) == example["answer"])
    assert [result["text"] for result in results[5:]] == texts
    assert [result["is_match"] for result in results[5:7]] == [True, False]
    assert [result["num_cut"] > 0 for result in results] == [LONG in each.values() for each in EXAMPLES]

    rows = {(row["task"], row["metric"]): row for row in last["summary"]}
    assert last["num_examples"] == len(EXAMPLES) and last["num_cut"] == 2
    assert rows["likely", "log_probability"]["value"] == pytest.approx(np.mean(scores))
    assert rows["likely", "log_probability"]["standard_error"] == pytest.approx(np.std(scores, ddof=1) / math.sqrt(3))
    num_bytes = len(" os") + len("def f") + len("  else c")
    assert rows["likely", "perplexity_per_byte"]["value"] == pytest.approx(math.exp(-sum(scores) / num_bytes))
    assert rows["match", "exact_match"] | {"task": "", "metric": ""} == {
        "task": "", "metric": "", "num_examples": 2, "value": 0.5, "standard_error": 0.5,
    }  # fmt: skip
    assert rows["text", "text"]["value"] is None

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    file.write_text("\n".join(map(json.dumps, EXAMPLES[:5])))
    cli.main(["evaluate", str(weights), "--tasks", str(file), "--mesh", "fsdp=4,model=2"])
    head, *table, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "examples", "metric", "value", "standard", "error"]
    shown = [float(word) for line in table for word in re.findall(r"-?\d+\.\d+", line)]
    known = [row[key] for row in last["summary"][: len(table)] for key in ("value", "standard_error")]
    assert shown == pytest.approx([number for number in known if number is not None], abs=1e-3)
    assert note == "5 examples, step 0; 1 cut from the left to 32 positions"


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"context": "a", "continuation": ""}, "tasks.jsonl:1: the continuation has no tokens"),
        ({"context": "a", "continuation": LONG * 2}, "tokens; the model has 32 positions"),
        ({"context": " ", "continuation": "a"}, "tasks.jsonl:1 has an empty context, and the tokenizer has neither"),
        ({"prompt": "a", "stop": [], "max_new_tokens": 32}, "tasks.jsonl:1: max_new_tokens is 32"),
    ],
)
def test_bad_examples(saved: LoadedModel, example: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"task": "a", **example}))
    ((name, read),) = read_examples(tmp_path / "tasks.jsonl").items()
    model = LanguageModel.of(replace(saved, end_id=None))
    with pytest.raises(spanax.SpanaxError, match=words):
        if isinstance(read, FreeText):
            model.continued([read], [name])
        else:
            model.log_likelihoods([(read.context, read.continuation)], [name])


def test_a_checkpoint_without_a_tokenizer(saved: LoadedModel) -> None:
    with pytest.raises(spanax.SpanaxError, match="has no tokenizer"):
        LanguageModel.of(replace(saved, tokenizer=None))


def test_a_limit_draws_examples_of_each_task() -> None:
    examples = read_examples(ROOT / "examples" / "tasks.jsonl")
    drawn = _drawn(examples, 2, 0)
    assert [each.task for each in drawn.values()] == [
        task for task in dict.fromkeys(each.task for each in examples.values()) for _ in range(2)
    ]
    assert drawn == _drawn(examples, 2, 0) and any(drawn != _drawn(examples, 2, seed) for seed in range(1, 9))


def test_texts_begin_as_the_tokenizer_or_the_chat_template_says(saved: LoadedModel) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(saved.tokenizer.to_str())
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="# $A !", special_tokens=[("#", 7), ("!", saved.end_id)]
    )
    with_begin = replace(saved, tokenizer=tokenizer)
    assert begin_ids(saved.tokenizer) == () and LanguageModel.of(with_begin).begin == (7,)
    assert LanguageModel.of(with_begin, is_chat=True).begin == ()
    template = ChatTemplate("#{{ messages[0].content }}:")
    for key, example in (("context", MultipleChoice("a", "b", ("c",), 0)), ("prompt", ExactMatch("a", "b", ("c",)))):
        assert getattr(_asked(example, template), key) == "#b:"


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


SCORED = {
    ("import ", "os"): -16.746506, ("", "def f"): -21.604816, (LONG, " else c"): -44.087193, ("while", "x"): -5.987293,
    ("a  b ", "c"): -11.345698,
}  # fmt: skip
ROLLED = {LONG * 3: -1414.058548, "hello": -28.063290}
GENERATED = {("x =", "q"): "FFFFF˄orch", (LONG, "e"): "\x11" * 8, ("a", "!"): "\ufffdw" + "\x11" * 6}
"""Numbers and texts of the harness's `HFLM` for these weights: lm-eval 0.4.13, transformers 5.23.0, torch 2.14.1."""


@pytest.mark.slow
def test_the_model_of_the_harness_has_the_numbers_of_transformers(saved: LoadedModel) -> None:
    model = SpanaxLM(saved.model, saved.tokenizer, length=32, end_id=saved.end_id)
    scored = model.loglikelihood([asked(*pair) for pair in SCORED])
    assert [number for number, _ in scored] == pytest.approx([*SCORED.values()], abs=1e-4)
    assert not any(is_greedy for _, is_greedy in scored)
    rolled = model.loglikelihood_rolling([asked(text) for text in ROLLED])
    assert rolled == pytest.approx([*ROLLED.values()], abs=1e-3)
    requests = [asked(prompt, {"until": [stop], "max_gen_toks": 8}) for prompt, stop in GENERATED]
    assert model.generate_until(requests) == [*GENERATED.values()]
    assert model.generate_until([asked("x =", {"until": ["h", "r"], "max_gen_toks": 8})]) == ["FFFFF\u02c4o"]
    tokenizer = tokenizers.Tokenizer.from_str(saved.tokenizer.to_str())
    tokenizer.add_special_tokens(["F"])  # not part of decoded texts, and still a stop
    model = SpanaxLM(saved.model, tokenizer, length=32)
    assert model.generate_until([asked("x =", {"until": "F", "max_gen_toks": 8})]) == [""]
    with pytest.raises(spanax.SpanaxError, match="the task samples"):
        model.generate_until([asked("x =", {"do_sample": True})])


TASK = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_bytes}]
"""


@pytest.mark.filterwarnings("ignore")  # of the harness and of what it imports
def test_the_harness_has_the_same_numbers(saved: LoadedModel, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    (tmp_path / "choices.jsonl").write_text("\n".join(map(json.dumps, EXAMPLES[3:5])))
    (tmp_path / "choices.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    model = SpanaxLM(saved.model, saved.tokenizer, length=32, end_id=saved.end_id)
    found = lm_eval.simple_evaluate(model, tasks=["choices"], task_manager=manager)["results"]["choices"]
    for row in summary(evaluate(LanguageModel.of(saved), read_examples(tmp_path / "choices.jsonl"))):
        name = {"accuracy": "acc", "accuracy_by_bytes": "acc_bytes"}[row["metric"]]
        expected = row["value"], row["standard_error"]
        assert (found[f"{name},none"], found[f"{name}_stderr,none"]) == pytest.approx(expected)
