"""What a compiler changes in a partitioned program."""

from dataclasses import dataclass

from spanax.hardware.cluster import Cluster

LARGEST_SCATTERED = 4
"""Sums over a whole slice of at most so many chips are reduce-scattered, whatever its shape."""


@dataclass(frozen=True)
class Compiler:
    """What a compiler changes in the collectives and matmuls of a partitioned program.

    Attributes:
      adds_first: whether it adds partial sums before it all-reduces them, once: those for TPUs and GPUs do, XLA's for
        CPUs does not. Source: the programs of notes/check-accuracy.md.
      narrows_first: whether it converts a sum to a narrower dtype before it all-reduces it, where only the converted
        sum is used: that for TPUs does. Source: programs of tests/byo for v5e:2x4, libtpu 0.0.52.
      rounds_first: whether it gathers float32 operands in 16 bits where matmuls round them: that for TPUs does.
      expands_ragged: whether ragged matmuls are masked matmuls before they are partitioned, so that one over rows
        computes each shard of its result alone: for CPUs they are, while libtpu 0.0.52 computes all of it on every
        device. Source: tests/byo/sorted_moe.py under `spanax check`, levels 2 and 3.
      sends_rows: whether it has a ragged all-to-all: those for TPUs and GPUs do, XLA's for CPUs does not.
      all_reduced: the number of devices over which it all-reduces sums that are stored sharded; 0 for none.
    """

    adds_first: bool = False
    narrows_first: bool = False
    rounds_first: bool = False
    expands_ragged: bool = False
    sends_rows: bool = False
    all_reduced: int = 0

    @staticmethod
    def of(cluster: Cluster) -> "Compiler":
        """Returns the compiler of a cluster, without what depends on the sizes of a mesh."""
        expands = cluster.expands_ragged
        return Compiler(cluster.adds_first, cluster.narrows_first, expands_ragged=expands, sends_rows=not expands)

    @staticmethod
    def of_program(cluster: Cluster, *, adds_first: bool) -> "Compiler":
        """Returns the compiler of a program for a cluster; without `adds_first`, up to its partitioner."""
        is_tpu = adds_first and cluster.narrows_first
        all_reduced = all_reduced_devices(cluster) if is_tpu else 0
        # Up to the partitioner, programs are compiled for simulated devices.
        return Compiler(adds_first, is_tpu, is_tpu, not adds_first, adds_first, all_reduced)


def all_reduced_devices(cluster: Cluster) -> int:
    """Returns the number of devices of a slice whose shape favors all-reduces over reduce-scatters; 0 for others.

    A sum over all devices of a square or three-dimensional torus is all-reduced and sliced. Source: programs with one
    reduce-scatter for 22 shapes of v5e, v5p and v6e, libtpu 0.0.52.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> [all_reduced_devices(cluster(name)) for name in ("v5e:4x4", "v5p:2x2x4", "v5e:2x4", "v5e:2x2", "h100:16")]
      [16, 16, 0, 0, 0]
    """
    dims = [size for size in cluster.shape if size > 1]
    is_square = len(dims) == 2 and dims[0] == dims[1]
    is_slice = cluster.is_torus and cluster.num_slices == 1 and cluster.num_devices > LARGEST_SCATTERED
    return cluster.num_devices if is_slice and (is_square or len(dims) > 2) else 0
