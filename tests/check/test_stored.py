"""One small step compiled for TPUs and GPUs, compared with the figures that follow from its shapes.

The step: three scanned layers of a 256 x 1024 and a 1024 x 256 matrix, 2048 examples, bfloat16 arithmetic, SGD.
"""

import functools
import gzip
from pathlib import Path

import numpy as np
import pytest

import hlo_programs
import spanax
import stored
from spanax.check.compilers.target import platform_of
from spanax.check.hlo.collectives import Collective, collectives, totals
from spanax.check.hlo.flops import program_flops
from spanax.check.hlo.messages import parse_hlo
from spanax.check.hlo.module import Module, read_module
from spanax.plan.cost.memory.tiles import padded_bytes
from spanax.plan.evaluate import evaluate

LAYERS, MATRIX = 3, 256 * 1024
BY_NAME = {case.on: case for case in stored.CASES}


@functools.cache
def program() -> spanax.Program:
    return stored.program()


@functools.cache
def module(on: str) -> Module:
    return read_module(gzip.decompress(BY_NAME[on].path.read_bytes()))


def collectives_on(on: str) -> tuple[Collective, ...]:
    case = BY_NAME[on]
    return collectives(module(on), spanax.MeshShape.of(case.mesh))


@pytest.mark.parametrize("on", BY_NAME)
def test_flops_equal_the_plan_exactly(on: str) -> None:
    # Six matmuls of 2048 x 256 x 1024 a layer, less the gradient of the batch; over all devices.
    assert program_flops(module(on)) == LAYERS * 6 * 2 * 2048 * MATRIX / 8
    assert all(item.is_counted for item in collectives_on(on))
    case = BY_NAME[on]
    assert evaluate(program(), case.plan(program()), case.cluster).matmul_flops == program_flops(module(on))


@pytest.mark.parametrize("on", BY_NAME)
def test_the_bytes_of_the_state_equal_level_0(on: str) -> None:
    case = BY_NAME[on]
    leaves = case.plan(program()).leaves
    arguments = module(on).entry.parameters
    for index, leaf in enumerate(leaves):
        itemsize = np.dtype(leaf.dtype).itemsize
        assert arguments[index].shape.padded_bytes == padded_bytes(
            leaf.local_shape, itemsize, platform_of(case.cluster)
        )


@pytest.mark.parametrize("on", BY_NAME)
def test_weights_are_gathered_in_bfloat16_twice_a_layer(on: str) -> None:
    case = BY_NAME[on]
    split = spanax.MeshShape.of(case.mesh).ways(["model"])
    gathered = sum(item.num_bytes for item in collectives_on(on) if item.kind == "all-gather" and item.axes == "fsdp")
    assert gathered == LAYERS * 2 * 2 * MATRIX * 2 // split


@pytest.mark.parametrize("on, whole", [("v5e:2x4", 1), ("v5p:2x2x2", 0), ("h100:8", 0), ("v5e:2x2:2", 0)])
def test_gradients_are_scattered_or_summed(on: str, whole: int) -> None:
    """The compiler for v5e all-reduces one of the two gradients on one slice."""
    sizes = spanax.MeshShape.of(BY_NAME[on].mesh)
    split, ways = sizes.ways(["model"]), sizes.ways(["fsdp"])
    moved = totals(collectives_on(on))["fsdp"]
    assert moved["reduce-scatter"] == LAYERS * (2 - whole) * MATRIX * 2 // split // ways
    assert moved["all-reduce"] // (LAYERS * MATRIX * 2 // split) == whole


def test_between_slices_parts_of_gradients_are_summed() -> None:
    moved = totals(collectives_on("v5e:2x2:2"))["data"]["all-reduce"]
    assert moved == pytest.approx(LAYERS * 2 * MATRIX * 2 / 4, rel=1e-3)
    assert {item.group_size for item in collectives_on("v5e:2x2:2") if item.axes == "data"} == {2}


@pytest.mark.parametrize("on", ["v5e:2x4", "v5p:2x2x2", "h100:8"])
def test_gathers_name_the_line_of_the_model(on: str) -> None:
    code = Path(stored.__file__).read_text().splitlines()
    gathers = [item for item in collectives_on(on) if item.kind == "all-gather"]
    for gather in gathers:
        file, _, line = gather.source.partition(":")
        assert file == "tests/stored.py" and "self.down(" in code[int(line) - 1]
        assert "while/body" in gather.op_name


def test_text_and_serialized_programs_are_read_equally() -> None:
    from jaxlib import _hlo

    case = BY_NAME["v5e:2x4"]
    message = parse_hlo(gzip.decompress(case.path.read_bytes()))
    written = _hlo.HloModule.from_serialized_hlo_module_proto(message.SerializeToString()).to_string()
    mesh = spanax.MeshShape.of(case.mesh)
    assert totals(collectives(hlo_programs.read_text(written), mesh)) == totals(collectives_on("v5e:2x4"))


CONVOLUTION = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"


@pytest.mark.parametrize(
    "line",
    [
        f"r = f32[2,8,8,16] convolution(x, w), {CONVOLUTION}",
        f'c = (f32[2,8,8,16], u8[0]) custom-call(x, w), {CONVOLUTION}, custom_call_target="__cudnn$convForward"',
        f'c = (f32[2,8,8,4], u8[0]) custom-call(y, w), {CONVOLUTION}, custom_call_target="__cudnn$convBackwardInput"',
        f'c = (f32[3,3,4,16], u8[0]) custom-call(x, y), {CONVOLUTION}, custom_call_target="__cudnn$convBackwardFilter"',
    ],
)
def test_a_convolution_and_its_gradients_count_the_same_flops(line: str) -> None:
    arrays = ("x = f32[2,8,8,4] parameter(0)", "w = f32[3,3,4,16] parameter(1)", "y = f32[2,8,8,16] parameter(2)")
    inside = (3 * 8 - 2) ** 2  # of 3 positions for each of 8 results, one is outside at either end
    assert program_flops(hlo_programs.read_text(hlo_programs.entry(*arrays, line))) == 2 * 2 * 16 * 4 * inside
