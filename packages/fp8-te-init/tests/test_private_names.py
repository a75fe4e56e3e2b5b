"""What this package uses of torch's private parts is there; an upgrade that moves it fails here, by its name."""

import inspect

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fp8_te_init._compat import LOADING, PRIVATE_NAMES, dtensor_like, float32_like, local_of


def test_private_names_exist_and_rewrapping_keeps_the_place():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4, 3, dtype=torch.bfloat16), init_device_mesh("cpu", (1,)), [Shard(0)])
        missing = [name for name in PRIVATE_NAMES["DTensor"] if not hasattr(tensor, name)]
        assert missing == [], f"torch {torch.__version__} has no DTensor.{missing}: adapt fp8_te_init/_compat.py"
        codes = dtensor_like(tensor, torch.ones(4, 3, dtype=torch.float8_e4m3fn))
        assert (codes.dtype, codes.placements, codes.shape) == (torch.float8_e4m3fn, (Shard(0),), (4, 3))
        assert float32_like(tensor, torch.ones(4, 3)).dtype == torch.float32
        assert local_of(tensor).shape == (4, 3)
    finally:
        dist.destroy_process_group()


def test_the_function_that_loads_into_models_is_where_it_was():
    name, arguments = LOADING
    function = getattr(torch.distributed.checkpoint.state_dict, name, None)
    advice = f"torch {torch.__version__} has no {name}{arguments}: adapt fp8_te_init/_compat.py"
    assert function is not None, advice
    assert tuple(inspect.signature(function).parameters) == arguments, advice
