"""Files that are made to harm their reader, and a program that reads each through the command line.

Every case is a function that fills a folder and returns the command that is to refuse it. `hostile.py FOLDER light` or
`heavy` makes and reads them all in one process and prints a JSON line for each: exit code, seconds of CPU, the most
memory it took beyond what was there before, and what was said. The light ones must not need JAX.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spanax import cli
from spanax.train.store import manifest

Case = Callable[[Path], list[str]]
LIGHT: dict[str, tuple[Case, set[int]]] = {}
HEAVY: dict[str, tuple[Case, set[int]]] = {}

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 4_000
WORKLOAD = """
import numpy as np, spanax
from flax import nnx
rows = np.ones((4, 8, 16), "float32")
tiny = spanax.Workload(build=lambda rngs: nnx.Linear(16, 16, rngs=rngs), batch=rows[0], num_steps=2,
                       loss=lambda model, x: (model(x) ** 2).mean(), source=[row for row in rows])
def words(batch_size=8, seq_len=4, vocab_size=256):
    tokens = np.ones((batch_size, seq_len), "int32")
    return spanax.Workload(build=lambda rngs: nnx.Embed(vocab_size, 8, rngs=rngs), num_steps=2, vocab_size=vocab_size,
                           batch={"inputs": tokens, "targets": tokens}, source="text.txt",
                           loss=lambda model, batch: model(batch["inputs"]).mean())
"""


class Payload:
    """Unpickled, it would leave a file called `executed`."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


PICKLED = pickle.dumps(Payload())


def light(name: str, *codes: int) -> Callable[[Case], Case]:
    return lambda case: LIGHT.setdefault(name, (case, set(codes or (65,))))[0]


def heavy(name: str, *codes: int) -> Callable[[Case], Case]:
    return lambda case: HEAVY.setdefault(name, (case, set(codes or (65,))))[0]


# ---- checkpoints, read without JAX


def step(root: Path, number: str = "7") -> Path:
    """A good step."""
    folder = root / "steps" / number
    (folder / "arrays").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "arrays" / "0").write_bytes(bytes(100))
    saved = {"saved_at": manifest.utc(0), "leaves": {"kernel": "float32[4]"}, "meta": {}}
    (folder / "meta.json").write_text(json.dumps(saved))
    manifest.write(folder)
    return folder


def listed(folder: Path, **changes: Any) -> None:
    """A manifest whose own checksum is right, and whose content is another."""
    content = json.loads((folder / "manifest.json").read_bytes())
    del content["crc32"]
    for name, entry in changes.items():
        content[name] = {**content[name], **entry} if isinstance(entry, dict) else entry
    (folder / "manifest.json").write_bytes(manifest._render(content))


def verify(root: Path) -> list[str]:
    return ["checkpoint", "verify", str(root / "steps")]


def manifests() -> None:
    entry = {"size": 3, "crc32": "00000000"}
    lists: dict[str, dict[str, Any]] = {
        "names a file above": {"../../secret": entry},
        "names an absolute file": {"/etc/passwd": entry},
        "names a hundred thousand files": {f"arrays/{index}": entry for index in range(100_000)},
        "declares ten gigabytes": {"arrays/0": {"size": 10**10, "crc32": "00000000"}},
        "declares a size of 4,000 digits": {"arrays/0": {"size": int(HUGE), "crc32": "00000000"}},
        "declares no size": {"arrays/0": {"size": None, "crc32": []}},
        "names the terminal": {"\x1b]0;owned\x07": entry},
    }
    for name, files in lists.items():

        def case(root: Path, files: dict[str, Any] = files) -> list[str]:
            listed(step(root), files=files)
            return verify(root)

        light(f"manifest {name}")(case)
    texts = {
        "nested deep": DEEP, "with one name twice": '{"files": {}, "files": {}}', "of one long number": HUGE * 3,
        "of empty tables": "[" + "{}," * 500_000 + "{}]", "of nothing": "", "that is no UTF-8": "\udcff",
    }  # fmt: skip
    for name, text in texts.items():

        def written(root: Path, text: str = text) -> list[str]:
            (step(root) / "manifest.json").write_text(text, errors="surrogateescape")
            return verify(root)

        light(f"manifest {name}")(written)


manifests()


@light("meta nested deep", 0)
def _(root: Path) -> list[str]:
    folder = step(root)
    (folder / "meta.json").write_text(DEEP)
    manifest.write(folder)
    return ["checkpoint", "show", str(root / "steps")]


@light("meta of empty tables", 0)
def _(root: Path) -> list[str]:
    folder = step(root)
    (folder / "meta.json").write_text('{"meta": [' + "{}," * 2_000_000 + "{}]}")
    manifest.write(folder)
    return ["checkpoint", "show", str(root / "steps")]


@light("a step with a socket in it")
def _(root: Path) -> list[str]:
    folder, before = step(root), os.getcwd()
    os.chdir(folder)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as built:
        built.bind("socket")
    os.chdir(before)
    return verify(root)


@light("a step deeper than any path")
def _(root: Path) -> list[str]:
    folder, before = step(root), os.getcwd()
    os.chdir(folder)
    for _ in range(30):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    os.chdir(before)
    return verify(root)


@light("steps of strange names")
def _(root: Path) -> list[str]:
    for name in ("007", "\u0667", "7.old", "-7", "9" * 30):
        (root / "steps" / name).mkdir(parents=True)
        (root / "steps" / name / "manifest.json").write_text("{}")
    return verify(root)


@light("a pickle in a step is bytes", 0)
def _(root: Path) -> list[str]:
    folder = step(root)
    (folder / "arrays" / "data.pkl").write_bytes(PICKLED)
    manifest.write(folder)
    return verify(root)


# ---- configurations


def configs() -> None:
    texts = {
        "nested deep": "steps = " + "[" * 30_000, "with tables nested deep": "[" + "a." * 30_000 + "a]",
        "with one long name": "a." * 30_000 + "a = 1", "with a long number": "steps = " + "9" * 20_000,
        "with one name twice": "steps = 1\nsteps = 2", "of bytes": "\x00\udcff" * 99, "with a wrong type": "steps = []",
        "with a date": "steps = 1979-05-27", "of no number": "lr = nan", "without an end": 'data = """' + "x" * 9999,
    }  # fmt: skip
    for name, text in texts.items():

        def case(root: Path, text: str = text) -> list[str]:
            (root / "c.toml").write_text(text, errors="surrogateescape")
            return ["train", "--config", str(root / "c.toml")]

        light(f"configuration {name}", 65, 2, 78)(case)


configs()


@light("configuration without an end")
def _(root: Path) -> list[str]:
    (root / "c.toml").symlink_to("/dev/zero")
    return ["train", "--config", str(root / "c.toml")]


@light("configuration that is a pipe")
def _(root: Path) -> list[str]:
    os.mkfifo(root / "c.toml")
    return ["train", "--config", str(root / "c.toml")]


@light("configuration of a run that is resumed")
def _(root: Path) -> list[str]:
    (root / "run").mkdir()
    (root / "run" / "config.toml").write_text("steps = " + "[" * 30_000)
    return ["train", "--resume", "--output-dir", str(root / "run")]


# ---- plans

LEAF = {
    "path": "kernel", "shape": [16, 16], "dtype": "float32", "kind": "param", "axes": ["embed", "mlp"],
    "spec": [[], ["data"]], "local_shape": [16, 2], "local_bytes": 128, "reason": "",
}  # fmt: skip
PLAN = {
    "fingerprint": "0", "mesh": {"data": 8}, "layout": {"name": "data", "computed": [["data", ["batch"]]]}, "pins": [],
    "leaves": [LEAF], "batch": [LEAF | {"kind": "batch", "path": "x"}], "why": "", "version": 1, "schedule": {},
}  # fmt: skip


def plans() -> None:
    changes: dict[str, dict[str, Any]] = {
        "of a billion devices": {"mesh": {"data": 10**9}},
        "of no devices": {"mesh": {"data": 0}},
        "of a mesh that is text": {"mesh": "data=8"},
        "of a shape of no array": {"leaves": [LEAF | {"shape": [10**30, 16]}]},
        "of a larger shape than any": {"leaves": [LEAF | {"shape": [2**40, 2**40], "local_shape": [2**40, 2**37]}]},
        "of a negative shape": {"leaves": [LEAF | {"shape": [-16, 16]}]},
        "of a split that is none": {"leaves": [LEAF | {"spec": [["nowhere"], []]}]},
        "of one axis twice": {"leaves": [LEAF | {"spec": [["data"], ["data"]]}]},
        "of other parts": {"leaves": [LEAF | {"local_shape": [16, 1]}]},
        "of too many dims": {"leaves": [LEAF | {"shape": [1] * 100_000}]},
        "of bytes without end": {"leaves": [LEAF | {"local_bytes": int(HUGE)}]},
        "that writes to the terminal": {"leaves": [LEAF | {"path": "\x1b]0;owned\x07"}]},
        "of a trillion microbatches": {"mesh": {"pipe": 8}, "schedule": {"num_stages": 8, "microbatches": 10**12}},
        "of more tasks than fit": {"mesh": {"data": 8}, "schedule": {"num_stages": 1024, "microbatches": 65536}},
        "of a list": {"leaves": {"a": 1}},
        "with more": {"__class__": "os.system"},
        "of another version": {"version": 10**9},
    }
    for name, change in changes.items():

        def case(root: Path, change: dict[str, Any] = change) -> list[str]:
            (root / "plan.json").write_text(json.dumps(PLAN | change))
            return ["inspect", str(root / "plan.json"), *(["--schedule"] if "schedule" in change else [])]

        heavy(f"plan {name}")(case)
    texts = {
        "nested deep": DEEP, "of no number": json.dumps(PLAN).replace("128", "NaN"), "of nulls": "[null]",
        "of infinity": json.dumps(PLAN).replace("128", "1e999"), "with one name twice": '{"mesh": {}, "mesh": {}}',
        "of empty tables": "[" + "{}," * 5_000_000 + "{}]", "of tables": "[" + '{"a":0},' * 400_000 + "{}]",
    }  # fmt: skip
    for name, text in texts.items():

        def written(root: Path, text: str = text) -> list[str]:
            (root / "plan.json").write_text(text)
            return ["inspect", str(root / "plan.json")]

        heavy(f"plan {name}")(written)


@heavy("(a plan that is good)", 0)
def _(root: Path) -> list[str]:
    (root / "plan.json").write_text(json.dumps(PLAN))
    return ["inspect", str(root / "plan.json")]


plans()


@heavy("plan that is a pipe")
def _(root: Path) -> list[str]:
    os.mkfifo(root / "plan.json")
    return ["train", "--plan", str(root / "plan.json"), "--output-dir", str(root / "run")]


# ---- cluster files, summaries of a profile


def clusters() -> None:
    texts = {
        "nested deep": "memory = " + "[" * 30_000, "like itself": 'like = "c"',
        "of endless hosts": "devices_per_host = " + "9" * 1000,
        "of a billion cubed": 'like = "v5p"\ninside.shape = [1000000000, 1000000000, 1000000000]',
        "of no bytes": 'like = "h100"\nmemory = "nan GB"',
        "of endless bytes": 'like = "h100"\nmemory = "1e999 GB"', "of numbers for text": 'like = "h100"\nshape = 8',
    }  # fmt: skip
    for name, text in texts.items():

        def case(root: Path, text: str = text) -> list[str]:
            (root / "c.toml").write_text(text)
            return ["plan", "gpt-nano", "--on", f"{root / 'c.toml'}:1000000007"]

        heavy(f"cluster file {name}", 65, 2)(case)


clusters()


def summaries() -> None:
    good = {"steps": 1, "devices": 1, "step_seconds": 1.0, "communication": {}, "operations": {}, "seconds": {}}
    texts = {
        "nested deep": DEEP, "of no time": json.dumps(good | {"step_seconds": float("nan")}),
        "of endless time": json.dumps(good).replace("1.0", "1e999"), "of endless steps": json.dumps(good | {"steps":
        int(HUGE)}), "of text": json.dumps(good | {"step_seconds": "inf"}), "of a list": "[]",
    }  # fmt: skip
    for name, text in texts.items():

        def case(root: Path, text: str = text) -> list[str]:
            (root / "profile").mkdir()
            (root / "profile" / "summary.json").write_text(text)
            return ["check", "gpt-nano", "--on", "cpu:8", "--profiled", str(root)]

        heavy(f"summary {name}")(case)


summaries()


# ---- data


def words(root: Path, *flags: str) -> list[str]:
    (root / "w.py").write_text(WORKLOAD)
    return ["train", f"{root / 'w.py'}:words", "--output-dir", str(root / "run"), "--devices", "1", *flags]


def with_tokenizer(root: Path, text: str | bytes) -> list[str]:
    path = root / "t.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (root / "text.txt").write_text("to be or not to be " * 99)
    return words(root, "--tokenizer", str(path), "--data", str(root / "text.txt"))


def tokenizers() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    texts: dict[str, str | bytes] = {
        "nested deep": DEEP,
        "with an id of four billion": json.dumps(tokenizer | {"model": model | {"vocab": {"a": 0, "b": 2**32 - 1}}}),
        "with a negative id": json.dumps(tokenizer | {"model": model | {"vocab": {"a": -1}}}),
        "of one long number": json.dumps(tokenizer).replace("1}", HUGE + "}"),
        "of a pickle": PICKLED,
        "with an unknown end of a merge": json.dumps(
            tokenizer | {"model": {"type": "BPE", "vocab": {"a": 7}, "merges": [["a", "a"]]}}
        ),
        "without a token for unknown words": json.dumps(tokenizer | {"model": model | {"unk_token": "c"}}),
        "of another kind": json.dumps(tokenizer | {"model": {"type": "os.system"}}),
    }
    for name, text in texts.items():
        heavy(f"tokenizer {name}")(lambda root, text=text: with_tokenizer(root, text))


tokenizers()


@heavy("tokenizer that is a pipe")
def _(root: Path) -> list[str]:
    command = with_tokenizer(root, "")
    (root / "t.json").unlink()
    os.mkfifo(root / "t.json")
    return command


@heavy("text without an end")
def _(root: Path) -> list[str]:
    (root / "text.txt").symlink_to("/dev/zero")
    return words(root, "--data", str(root / "text.txt"))


@heavy("text that is a pipe")
def _(root: Path) -> list[str]:
    os.mkfifo(root / "text.txt")
    return words(root, "--data", str(root / "text.txt"))


def binary(root: Path, sidecar: str, content: bytes = bytes(range(256)) * 64) -> list[str]:
    (root / "a.bin").write_bytes(content)
    (root / "a.bin.json").write_text(sidecar)
    return words(root, "--data", str(root / "a.bin"))


heavy("sidecar nested deep")(lambda root: binary(root, DEEP))
heavy("sidecar of objects")(lambda root: binary(root, '{"dtype": "O"}'))
heavy("sidecar of fields")(lambda root: binary(root, '{"dtype": [["a", "O"], ["b", "<i4"]]}'))
heavy("sidecar of a gigabyte a token")(lambda root: binary(root, '{"dtype": "V1000000000"}'))
heavy("sidecar of shapes")(lambda root: binary(root, '{"dtype": "(100000,100000)i4"}'))
heavy("sidecar of a list")(lambda root: binary(root, "[]"))
heavy("tokens of four billion")(lambda root: binary(root, '{"dtype": "uint32"}', b"\xff\xff\xff\xff\0\0\0\0" * 999))
heavy("tokens below zero")(lambda root: binary(root, '{"dtype": "int8"}'))


@heavy("sidecar that is a pipe")
def _(root: Path) -> list[str]:
    command = binary(root, "")
    (root / "a.bin.json").unlink()
    os.mkfifo(root / "a.bin.json")
    return command


def table(root: Path, name: str, content: str | bytes) -> list[str]:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return words(root, "--data", str(path))


heavy("row nested deep")(lambda root: table(root, "a.jsonl", DEEP))
heavy("row of a long number")(lambda root: table(root, "a.jsonl", f'{{"input_ids": [{HUGE}]}}\n' * 99))
heavy("row of lone surrogates")(lambda root: table(root, "a.jsonl", '{"text": "\\ud800"}\n' * 99))
heavy("rows of a pickle")(lambda root: table(root, "a.array_record", PICKLED))
heavy("rows of nothing but the name", 65, 2)(lambda root: table(root, "a.parquet", b"PAR1" * 99))


@heavy("table without an end")
def _(root: Path) -> list[str]:
    (root / "a.jsonl").symlink_to("/dev/zero")
    return words(root, "--data", str(root / "a.jsonl"))


@heavy("saved dataset that leads elsewhere")
def _(root: Path) -> list[str]:
    (root / "saved").mkdir()
    (root / "saved" / "dataset_info.json").write_text("{}")
    (root / "saved" / "state.json").write_text('{"_data_files": [{"filename": "../../etc/x.arrow"}]}')
    return words(root, "--data", str(root / "saved"))


# ---- run folders


def resumed(root: Path, spoil: Callable[[Path], object]) -> list[str]:
    """A run of two steps with one change and a matching manifest, to be resumed."""
    shutil.copytree(root.parent / "good", root / "run")
    newest = root / "run" / "checkpoints" / "2"
    spoil(newest)
    manifest.write(newest)
    flags = ("--output-dir", str(root / "run"), "--resume", "--steps", "3", "--devices", "1")
    return ["train", f"{root.parent / 'w.py'}:tiny", *flags]


def rewritten(pattern: str, content: bytes) -> Callable[[Path], object]:
    def spoil(newest: Path) -> None:
        result = sorted(path for path in newest.glob(pattern) if path.is_file())
        assert result, pattern
        for path in result:
            path.write_bytes(content)

    return spoil


for _pattern in ("arrays/*METADATA*", "arrays/state/*METADATA*", "arrays/state/_sharding"):
    for _kind, _content in {"a pickle": PICKLED, "nested deep": DEEP.encode()}.items():
        heavy(f"checkpoint whose {_pattern} is {_kind}", 0, 65)(
            lambda root, p=_pattern, c=_content: resumed(root, rewritten(p, c))
        )
for _pattern in ("arrays/state/manifest.ocdbt", "arrays/state/**/d/*", "meta.json"):
    heavy(f"checkpoint whose {_pattern} is a pickle")(lambda root, p=_pattern: resumed(root, rewritten(p, PICKLED)))
heavy("checkpoint whose meta is nested deep")(lambda root: resumed(root, rewritten("meta.json", DEEP.encode())))


@heavy("run whose metrics never end a line", 0)
def _(root: Path) -> list[str]:
    command = resumed(root, lambda newest: None)
    os.truncate(root / "run" / "metrics.jsonl", 200 << 20)
    return command


@heavy("run with gigabytes of events", 0)
def _(root: Path) -> list[str]:
    command = resumed(root, lambda newest: None)
    path = root / "run" / "events.jsonl"
    os.truncate(path, 2 << 30)
    with open(path, "ab") as file:
        file.write(b"\n" + b'{"event": "begin", "time": 1}\n' * (8 << 16))
    return command


@heavy("run whose metrics are anything", 0)
def _(root: Path) -> list[str]:
    command = resumed(root, lambda newest: None)
    (root / "run" / "metrics.jsonl").write_bytes(f'[]\n7\n{{"step": "x"}}\n{DEEP}\n'.encode() + b"\xff\xfe\n")
    return command


# ---- reading them


def peak_bytes() -> int:
    reported = Path("/proc/self/status").read_text()
    return int(reported.partition("VmHWM:")[2].split()[0]) << 10


def watched(command: list[str]) -> dict[str, Any]:
    """What a command came to."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, output = peak_bytes(), io.StringIO()

    def over(*_: Any) -> None:
        raise TimeoutError("it took more than 240 s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(240)
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            cli.main(command)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            code = -1
            traceback.print_exc()
        finally:
            signal.alarm(0)
    peak = peak_bytes()
    text = output.getvalue()
    return {
        "code": code, "peak_mb": peak >> 20, "more_mb": (peak - before) >> 20,
        "said": text[:2000], "is_clean": not {"\x1b", "\x07"} & set(text), "jax": "jax" in sys.modules,
    }  # fmt: skip


def snapshot(folder: Path) -> dict[str, Any]:
    """Files that a command must not write to."""
    result: dict[str, Any] = {}
    for path in sorted(folder.glob("outside*")) + sorted((folder / "outside").glob("**/*")):
        result[str(path)] = zlib.crc32(path.read_bytes()) if path.is_file() else "folder"
    return result


def main(root: Path, which: str) -> None:
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    root.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    if which == "heavy":
        (root / "w.py").write_text(WORKLOAD)
        flags = ("--output-dir", str(root / "good"), "--devices", "1", "--layout", "data")
        built = watched(["train", f"{root / 'w.py'}:tiny", *flags])
        assert built["code"] == 0, built["said"]
    for index, (name, (case, codes)) in enumerate((LIGHT if which == "light" else HEAVY).items()):
        folder = root / f"case{index}"
        folder.mkdir()
        command = case(folder)
        before = snapshot(folder)
        result = watched(command)
        is_left = before == snapshot(folder) and not (root / "executed").exists()
        print(json.dumps({"name": name, "wanted": sorted(codes), **result, "untouched": is_left}), flush=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
