"""The protocol buffer messages of serialized HLO programs, with the fields that Spanax reads.

jaxlib does not provide XLA's message classes, so they are declared here. Source: openxla/xla xla/service/hlo.proto and
xla/xla_data.proto, whose field numbers XLA keeps backward compatible.
"""

from typing import Any

from google.protobuf.message import DecodeError

from spanax.documents import message_classes
from spanax.errors import FileError

MESSAGES = """
HloProto: hlo_module=1 HloModule
HloModule: name=1 bytes, entry_computation_name=2 string, computations=3 *HloComputation, entry_computation_id=6 int64,
  schedule=7 HloSchedule, stack_frame_index=17 StackFrameIndex
HloSchedule: sequences=1 *Sequence
Sequence: key=1 int64, value=2 Instructions
Instructions: instruction_ids=1 *int64
HloComputation: name=1 string, instructions=2 *HloInstruction, id=5 int64, root_id=6 int64
HloInstruction: name=1 string, opcode=2 string, shape=3 Shape, metadata=7 OpMetadata, literal=8 Literal,
  parameter_number=9 int64, tuple_index=13 int64, window=15 Window, convolution_dimension_numbers=16 ConvolutionDims,
  dynamic_slice_sizes=20 *int64, channel_id=26 int64, custom_call_target=28 string, dot_dimension_numbers=30 DotDims,
  id=35 int64, operand_ids=36 *int64, called_computation_ids=38 *int64, backend_config=43 bytes,
  replica_groups=49 *ReplicaGroup, source_target_pairs=52 *SourceTarget, comparison_direction=63 string,
  frontend_attributes=68 Attributes, collective_device_list=87 DeviceList, iota_replica_groups=92 IotaReplicaGroups,
  mesh_axes_replica_groups=93 MeshAxesReplicaGroups
OpMetadata: op_name=2 string, source_file=3 string, source_line=4 int32, stack_frame_id=15 int32
Attributes: map=1 *Attribute
Attribute: key=1 string, value=2 string
Shape: element_type=2 int32, dimensions=3 *int64, tuple_shapes=4 *Shape, layout=5 Layout
Layout: minor_to_major=1 *int64, tiles=6 *Tile, memory_space=8 int64
Tile: dimensions=1 *int64
Literal: preds=2 *bool, s32s=4 *int32, s64s=5 *int64, u32s=6 *uint32, u64s=7 *uint64, u8s=3 bytes, s8s=15 bytes
DotDims: lhs_contracting_dimensions=1 *int64
Window: dimensions=1 *WindowDim
WindowDim: stride=2 int64, padding_low=3 int64, window_dilation=5 int64, base_dilation=6 int64
ConvolutionDims: kernel_input_feature_dimension=3 int64, kernel_spatial_dimensions=6 *int64,
  output_batch_dimension=9 int64, output_feature_dimension=10 int64, input_spatial_dimensions=11 *int64,
  output_spatial_dimensions=12 *int64
SourceTarget: source=1 int64, target=2 int64
ReplicaGroup: replica_ids=1 *int64
IotaReplicaGroups: num_replica_groups=1 int64, num_devices_per_group=2 int64, iota_reshape_dims=3 *int64,
  iota_transpose_perm=4 *int32
DeviceList: replica_groups=1 *ReplicaGroup, iota_replica_groups=2 IotaReplicaGroups
MeshAxesReplicaGroups: mesh=1 Mesh, axes=2 *AxisRef
Mesh: axes=1 *MeshAxis, device_ids=2 *int64, iota=3 IotaDevices
MeshAxis: name=1 string, size=2 int64
IotaDevices: reshape_dims=1 *int64, transpose_perm=2 *int32
AxisRef: mesh_axis_index=1 int64, sub_axis=2 SubAxis
SubAxis: pre_size=1 int64, size=2 int64
StackFrameIndex: file_names=1 *string, file_locations=3 *FileLocation, stack_frames=4 *StackFrame
FileLocation: file_name_id=1 int32, line=3 int32
StackFrame: file_location_id=1 int32, parent_frame_id=2 int32
"""
"""A module's `name` is bytes to parse any HloProto."""

_CLASSES = message_classes(MESSAGES, "HloProto", "HloModule")


def parse_hlo(data: bytes) -> Any:
    """Parses a serialized HloModuleProto, or the module in an HloProto, and returns the HloModule message.

    Raises:
      DataError: the bytes are neither.
    """
    try:
        module = _CLASSES["HloModule"].FromString(data)
        if not module.entry_computation_name:  # the name of an HloModule is the module of an HloProto
            module = _CLASSES["HloProto"].FromString(data).hlo_module
    except DecodeError as error:
        raise FileError("this is not a serialized program.", where=str(error)) from None
    if not module.computations:
        raise FileError("this is not a serialized program.", where="it has no computations")
    return module
