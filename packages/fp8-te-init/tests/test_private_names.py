"""What this package uses of torch's private parts is there; an upgrade that moves it fails here, by its name."""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fp8_common.torch.compat import DISTRIBUTED, PRIVATE_NAMES, distributed_like

ADAPT = f"torch {torch.__version__}: adapt fp8_common/torch/compat.py"


def test_private_names_exist_and_rewrapping_keeps_the_place():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4, 3, dtype=torch.bfloat16), init_device_mesh("cpu", (1,)), [Shard(0)])
        missing = [name for name in PRIVATE_NAMES["DTensor"] if not hasattr(tensor, name)]
        assert missing == [], ADAPT
        codes = distributed_like(tensor, torch.ones(4, 3, dtype=torch.uint8))
        assert (codes.dtype, codes.placements, codes.shape) == (torch.uint8, (Shard(0),), (4, 3))
    finally:
        dist.destroy_process_group()


def test_modules_are_asked_whether_they_are_distributed_before_anything_is_sent():
    source = inspect.getsource(distribute_module)
    assert DISTRIBUTED in source, ADAPT
    assert source.index(f'"{DISTRIBUTED}"') < source.index("partition_fn("), ADAPT


def test_ddp_knows_its_group_and_what_it_ignores_before_it_gets_its_module():
    """`fp8_te_init.weight.replicas` broadcasts when the module is set."""
    source = inspect.getsource(DistributedDataParallel.__init__)
    module = source.index("self.module = module")
    assert source.index("self.process_group = ") < module
    assert source.index("self.parameters_to_ignore = ") < module < source.index("_sync_module_states(")
    assert issubclass(DistributedDataParallel, nn.Module)
