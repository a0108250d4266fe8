"""Output of compilers: buffer assignment, out-of-memory reports, programs."""

import json
import threading
from pathlib import Path

import pytest
from jaxlib import _hlo

import hlo_programs
from spanax.check.compilers.child import POLL_SECONDS, Answer, first_result
from spanax.check.compilers.compile import _assigned_bytes, _buffers, _result
from spanax.check.compilers.target import simulated_target
from spanax.check.hlo.module import read_module
from spanax.errors import CompilerError

ASSIGNED = """BufferAssignment:
allocation 0: size 512, page 0, thread-local:
 value: <238 select.23 @0> (size=512,offset=0): pred[]
allocation 1: size 4096, page 0, parameter 3, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 96, page 0, constant:
allocation 3: size 8192, page 0, preallocated-temp:
 value: <853 fusion @0> (size=8192,offset=0): f32[2048]
allocation 4: size 7777, color 1, page 0, preallocated-temp:
"""

REPORT = """Memory Space: default (color=0)
Total bytes: 21274964992 (19.81GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    2.33GiB( 22%);    2.33GiB;   5004935168;                3; bf16[12500,50000], 2xbf16[1,12500,50000]
   10.49GiB(100%);     512B;            0;                1; u32[]
    4.66GiB( 44%);  785.38MiB;       114688;                3; f32[8,12,1024,1024]

Memory Space: vmem (color=1)
    9.00GiB(100%);    9.00GiB;            0;                1; f32[1]
"""

OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (19.81G) exceeds available HBM (15.75G). HLO module: jit_step."
)


def folder(tmp_path: Path, **answer: object) -> Path:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "module_0.jit_step.x-buffer-assignment.txt").write_text(ASSIGNED)
    (tmp_path / "dump" / "module_0.jit_step.x-memory-usage-report.txt").write_text(REPORT)
    (tmp_path / "dump" / "module_1.extracted.x-memory-usage-report.txt").write_text("another module's")
    (tmp_path / "compiled.pb").write_bytes(b"program")
    (tmp_path / "answer.json").write_text(json.dumps({"platform_version": "v", "memory": {}} | answer))
    return tmp_path


def test_main_memory_is_counted_by_purpose(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(ASSIGNED)
    expected = {"arguments": 4096, "temporaries": 8192, "other": 96, "assigned": 12384}
    assert _assigned_bytes(tmp_path / "a.txt") == expected
    assert _result(folder(tmp_path), simulated_target(8)).memory == expected


def test_out_of_memory_errors_are_parsed_with_their_buffers(tmp_path: Path) -> None:
    result = _result(folder(tmp_path, error=OUT_OF_MEMORY), simulated_target(8))
    assert (result.needed_bytes, result.limit_bytes) == (int(19.81 * 2**30), int(15.75 * 2**30))
    assert [buffer.num_bytes for buffer in result.buffers] == [int(2.33 * 2**30), int(785.38 * 2**20), 512]
    assert result.buffers[0].shapes == "bf16[12500,50000], 2xbf16[1,12500,50000]"
    assert _buffers(None) == ()


def test_another_error_is_a_compiler_error(tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match="rejects the program: INVALID"):
        _result(folder(tmp_path, error="INVALID: no\nmore"), simulated_target(8))


def test_a_program_is_read_with_or_without_buffer_assignment() -> None:
    module = _hlo.hlo_module_from_text(hlo_programs.VARIADIC).as_serialized_hlo_module_proto()
    size = len(module)
    length = bytes([size & 127 | 128, size >> 7]) if size >= 128 else bytes([size])
    around = b"\x0a" + length + module + b"\x1a\x00"
    assert read_module(around).entry.name == read_module(module).entry.name


def test_a_program_of_one_computation_is_read() -> None:
    text = "HloModule one\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  ROOT %x = f32[4] parameter(0)\n}\n"
    assert list(hlo_programs.read_text(text).entry.parameters) == [0]


def test_a_complete_dump_is_returned(tmp_path: Path) -> None:
    whole = _hlo.hlo_module_from_text(hlo_programs.VARIADIC).as_serialized_hlo_module_proto()
    (tmp_path / "step.pb").write_bytes(whole[:-1])
    done = threading.Event()

    def compiled() -> Answer:
        assert not done.wait(4 * POLL_SECONDS)
        (tmp_path / "step.pb").write_bytes(whole)
        done.wait()
        return {}, b"late"

    assert first_result(tmp_path, "*.pb", compiled) == ({"memory": {}}, whole)
    done.set()
    assert first_result(tmp_path, "*.pb", lambda: ({"error": "no"}, b"")) == ({"error": "no"}, b"")
    assert first_result(tmp_path, "*.none", lambda: ({"memory": {"code": 1}}, b"made")) == (
        {"memory": {"code": 1}},
        b"made",
    )
    assert not (tmp_path / "compiled.pb").exists(), "one thread writes the answer, or another may cut it short"


def test_exceptions_of_the_compilation_are_raised(tmp_path: Path) -> None:
    def compiled() -> Answer:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        first_result(tmp_path, "*.pb", compiled)
