"""Meshes of nodes by ranks of a node, beside a model that FSDP2 shards over all of these ranks."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8Error


def node_groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of this rank: the same rank of each node, and the ranks of its node.

    Raises:
        Fp8Error: The mesh has not two dimensions.
    """
    if mesh.ndim != 2:
        raise Fp8Error(f"A mesh of nodes by ranks of a node has two dimensions, got {mesh}.")
    return mesh.get_group(0), mesh.get_group(1)


def check_nodes(mesh: DeviceMesh, group: dist.ProcessGroup, name: str) -> None:
    """Refuse, on all ranks alike, a mesh that is not of the ranks that shard something.

    Args:
        mesh: Nodes by ranks of a node.
        group: The ranks that shard it.
        name: What is sharded, for the error.

    Raises:
        Fp8Error: The mesh has other ranks, or the same in another order.
    """
    ranks, sharding = mesh.mesh.flatten().tolist(), sorted(dist.get_process_group_ranks(group))
    if sharding != ranks:
        raise Fp8Error(
            f"{name} is sharded over the ranks {sharding}, and the mesh of nodes has {ranks} row by row. Make the mesh "
            "of the same ranks, those of a node in one row."
        )
