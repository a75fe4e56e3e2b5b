"""Meshes of nodes by ranks of a node, beside a model that FSDP2 shards over all of these ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8Error
from fp8_common.torch.plugin import max_over_ranks


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


def check_replicas(replicas: dist.ProcessGroup, shards: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse, on all ranks alike, replicas that do not hold copies of the same shards. All ranks call it.

    Args:
        replicas: The ranks that are said to hold copies of this rank's shards.
        shards: The ranks that hold the shards of one copy.
        device: Of the shards.

    Raises:
        Fp8Error: Two of `replicas` belong to one copy, or hold shards of different places.
    """
    place, own = dist.get_group_rank(shards, dist.get_rank()), dist.get_rank()
    copies, one_copy = (dist.get_process_group_ranks(group) for group in (replicas, shards))
    wrong = set(copies) & set(one_copy) != {own}
    # The greatest and the least place among the replicas; then what any rank of this copy has found.
    places = torch.tensor([place, -place], dtype=torch.int32, device=device)
    ((first, last),), _ = max_over_ranks([places], replicas)
    flag = torch.tensor([wrong or int(first) != -int(last)], dtype=torch.int32, device=device)
    (found,), _ = max_over_ranks([flag], shards)
    if found.item():
        raise Fp8Error(
            f"replicas= has the ranks {copies}, and one copy of the model is sharded over {one_copy}: replicas are "
            "ranks of different copies that hold the same shard. Hand over the other dimension of the mesh."
        )
