"""Records of a run: any setting reads back, and no cut, changed or missing record is resumed from."""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spanax.documents import parse_toml
from spanax.entries.names import CONFIG, ENVIRONMENT, METRICS, PLAN, TOKENIZER
from spanax.errors import DataError, SpanaxError
from spanax.sealed import FORMAT, opened, sealed
from spanax.train.config import TrainConfig, check, with_settings
from spanax.train.record.folder import (
    changed_versions,
    check_records,
    config_text,
    recorded,
    saved_tokenizer,
    write_records,
)

PLAN_JSON = '{\n "version": 1,\n "layout": "fsdp"\n}\n'


def run_folder(place: Path) -> Path:
    """A folder with the records of a run that has begun."""
    place.mkdir(exist_ok=True)
    config = TrainConfig("mine.py:small", learning_rate=1e-4, keep_last=12, xla_flags="default")
    write_records(place, config.record(), PLAN_JSON, ["cpu:0"])
    (place / METRICS).write_text("{}\n")
    return place


def resumed(folder: Path) -> dict[str, Any]:
    """The settings of a resumed run, after all of its records are checked."""
    check_records(folder)
    changed_versions(folder)
    return recorded(folder)


# ---- round trips

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
VALUES = {
    str: TEXTS,
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
}


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    kinds = [kind for kind in (hint, *get_args(hint)) if kind in VALUES]
    return st.one_of(*([st.none()] if type(None) in get_args(hint) else []), *(VALUES[kind] for kind in kinds))


CONFIGS = st.builds(TrainConfig, **{name: of_hint(hint) for name, hint in get_type_hints(TrainConfig).items()})


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(CONFIGS)
@example(TrainConfig(data="\U0001f40d.txt", tokenizer='a"b\\c', field="\x00\x1b[2J\x7f\x85\u2028\u202e", init="a\nb\r"))
@example(TrainConfig(data=",".join(f"./part.{number}.jsonl=0.5" for number in range(99))))
def test_any_settings_read_back(config: TrainConfig) -> None:
    settings_read = parse_toml(opened(sealed(config_text(config.record()))))
    config_read = with_settings(TrainConfig(), settings_read, "config.toml")
    assert config_read.record() == config.record()


def test_settings_read_back_from_a_folder(tmp_path: Path) -> None:
    config = TrainConfig(
        "\U0001f40d.py:x", data="caf\xe9\n\x1b[31m", tokenizer='"', learning_rate=1e-5, init_partial=True
    )
    write_records(tmp_path, config.record(), PLAN_JSON, ["cpu:0"])
    assert with_settings(TrainConfig(), recorded(tmp_path), "").record() == config.record()
    assert opened((tmp_path / PLAN).read_text()) == PLAN_JSON
    assert changed_versions(tmp_path) == []


@pytest.mark.parametrize("name", [field.name for field in fields(TrainConfig) if "str" in str(field.type)])
def test_settings_that_are_not_utf8_are_refused_at_startup(name: str) -> None:
    with pytest.raises(SpanaxError, match="is not UTF-8") as error:
        check(replace(TrainConfig(output_dir="a"), **{name: "caf\udce9"}))
    assert len(str(error.value).splitlines()) == 2


def test_settings_too_long_to_be_read_back_are_refused_at_the_start() -> None:
    check(TrainConfig(data="\x00" * 10_000))
    with pytest.raises(SpanaxError, match="12,000 characters in --data"):
        check(TrainConfig(data="\x00" * 12_000))


# ---- cuts and changes


@pytest.mark.parametrize("name", [CONFIG, PLAN, ENVIRONMENT])
def test_every_truncation_and_changed_byte_is_rejected(name: str, tmp_path: Path) -> None:
    path = run_folder(tmp_path) / name
    content = path.read_bytes()
    assert resumed(tmp_path)["keep_last"] == 12
    few = range(len(content)) if name != ENVIRONMENT else range(0, len(content), 7)
    cut = [content[:end] for end in few]
    flipped = [
        content[:position] + bytes([content[position] ^ 1 << (position % 8)]) + content[position + 1 :]
        for position in few
    ]
    for damaged in (*cut, *flipped, content + b"\n", content * 2):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"cannot read the .* '{path}'"):
            resumed(tmp_path)


def test_every_truncated_or_changed_tokenizer_is_rejected(tmp_path: Path) -> None:
    assert saved_tokenizer(tmp_path) is None and saved_tokenizer(run_folder(tmp_path)) is None
    text = '{"model": {"vocab": {"\u0120a": 0}}}'
    write_records(tmp_path, TrainConfig().record(), PLAN_JSON, ["cpu:0"], tokenizer=text)
    path = tmp_path / TOKENIZER
    assert saved_tokenizer(tmp_path) == text == path.read_text()
    content = path.read_bytes()
    flipped = [content[:i] + bytes([content[i] ^ 1 << (i % 8)]) + content[i + 1 :] for i in range(len(content))]
    for damaged in (*(content[:end] for end in range(len(content))), *flipped, content + b"\n"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"cannot read the tokenizer '{path}'"):
            resumed(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"cannot read the tokenizer '{path}'"):
        resumed(tmp_path)


@pytest.mark.parametrize("name", [CONFIG, PLAN, ENVIRONMENT])
def test_a_run_needs_its_records(name: str, tmp_path: Path) -> None:
    (run_folder(tmp_path) / name).unlink()
    with pytest.raises(DataError, match=f"contains a run but no '{name}'"):
        resumed(tmp_path)
    (tmp_path / METRICS).unlink()  # killed before it was a run: it begins
    assert resumed(tmp_path) == ({} if name == CONFIG else recorded(tmp_path))


def test_a_record_of_another_version_or_without_a_checksum_is_refused(tmp_path: Path) -> None:
    path = run_folder(tmp_path) / CONFIG
    record = path.read_text()
    path.write_text(record.replace(f"format = {FORMAT}", f"format = {FORMAT + 1}"))
    with pytest.raises(
        DataError, match=f"it has version {FORMAT + 1}; this Spanax reads version {FORMAT}\n  fix: read"
    ):
        resumed(tmp_path)
    for text in (opened(record), ""):
        path.write_text(text)
        with pytest.raises(DataError, match="its checksum cannot be read"):
            resumed(tmp_path)


def test_a_record_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def named(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    flush, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(f"flush {named(fd)}"), flush(fd)))
    monkeypatch.setattr(
        os,
        "rename",
        lambda old, new, **folders: (done.append(f"name {new}"), rename(old, new, **folders)),
    )
    write_records(tmp_path, TrainConfig().record(), PLAN_JSON, [])
    for name in (CONFIG, PLAN, ENVIRONMENT):
        position = done.index(f"name {name}")
        assert done[position - 1].startswith(f"flush .{name}.") and done[position + 1] == f"flush {tmp_path.name}"
