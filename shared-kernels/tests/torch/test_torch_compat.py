"""The private names of torch that this package uses still mean what it takes them to mean."""

import subprocess
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_common.torch import _compat as compat


def ours() -> int:
    return 1


def theirs() -> int:
    return 1


def test_a_constant_is_marked_as_torch_marks_it():
    torch.compiler.assume_constant_result(theirs)
    compat.assume_constant_result(ours)
    assert vars(ours) == vars(theirs), "torch marks constants in another way now: change fp8_common/torch/_compat.py."


def test_fake_tensors_are_told_from_others():
    x = torch.nn.Parameter(torch.ones(2))
    with FakeTensorMode() as mode:
        fakes = [torch.ones(2), mode.from_tensor(x)]
    message = "torch makes fake tensors of another class now: change fp8_common/torch/_compat.py."
    assert [isinstance(each, compat.FakeTensor) for each in (x, x.data, *fakes)] == [False, False, True, True], message


def test_importing_does_not_import_the_compiler():
    code = "import sys, torch.distributed.fsdp, torch.distributed.tensor; before = 'torch._dynamo' in sys.modules"
    code += "; import fp8_common.torch, fp8_common.torch.sharding.replaced"
    code += ", fp8_common.torch.sharding.gradients, fp8_common.torch.linear.function"
    code += "; assert before or 'torch._dynamo' not in sys.modules, 'Something imports Dynamo: half a second lost'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_compiler_is_disabled_as_torch_disables_it():
    message = "torch disables the compiler in another way now: change fp8_common/torch/_compat.py."
    torch._dynamo.reset()
    assert torch.compile(lambda x: x + compat.disable_compiler(theirs)(), backend="eager")(torch.ones(1)) == 2, message
    seen = []
    hidden = compat.disable_compiler(lambda: seen.append(torch.compiler.is_compiling()))
    torch.compile(lambda x: (hidden(), x + 1)[1], backend="eager")(torch.ones(1))
    assert seen == [False], message
