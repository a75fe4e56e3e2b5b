"""What this package uses of torch's private parts is there; an upgrade that moves it fails here, by its name."""

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def test_ddp_knows_its_group_and_what_it_ignores_before_it_gets_its_module():
    """`fp8_te_init.weight.replicas` broadcasts when the module is set."""
    source = inspect.getsource(DistributedDataParallel.__init__)
    module = source.index("self.module = module")
    assert source.index("self.process_group = ") < module
    assert source.index("self.parameters_to_ignore = ") < module < source.index("_sync_module_states(")
    assert issubclass(DistributedDataParallel, nn.Module)
