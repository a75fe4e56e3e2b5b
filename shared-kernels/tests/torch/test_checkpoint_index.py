"""Reading the index of a checkpoint: any content of the file gives an index or one `Fp8Error`."""

import os
import pickle
import warnings

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from torch.distributed.checkpoint.metadata import Metadata

from fp8_common import Fp8Error
from fp8_common.torch._checkpoint import read_metadata

STATE = {
    "model": {"weight": torch.ones(4, 3, dtype=torch.bfloat16), "codes": torch.zeros(5, dtype=torch.float8_e4m3fn)},
    "optim": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]},
    "step": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
        dcp.save(STATE, checkpoint_id=path, no_dist=True)
    return path


def test_a_whole_index_is_read_as_torch_reads_it(folder):
    ours, theirs = read_metadata(folder), dcp.FileSystemReader(folder).read_metadata()
    message = "torch keeps something else in the index now: change fp8_common/torch/_checkpoint.py."
    assert ours.state_dict_metadata == theirs.state_dict_metadata, message
    assert ours.storage_data == theirs.storage_data, message
    assert ours.planner_data == theirs.planner_data, message


def edits(draw, content):
    """Some bytes replaced, removed or put in, and perhaps the end cut off."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(damaged[: draw(st.integers(1, len(damaged)))] if draw(st.booleans()) else damaged)


def test_a_damaged_index_is_refused_or_still_one(folder, tmp_path, full):
    content = (folder / ".metadata").read_bytes()
    refused = []

    @settings(max_examples=5000 if full else 150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def check(data):
        (tmp_path / ".metadata").write_bytes(edits(data.draw, content))
        try:
            assert isinstance(read_metadata(tmp_path), Metadata)
        except Fp8Error as error:
            refused.append(str(error))

    check()
    assert len(refused) > 20, "most damage must be noticed for this to mean something"
    assert all(f"{tmp_path}" in sentence for sentence in refused)


class Call:
    """Unpickled, it calls a function."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load, dcp.FileSystemWriter])
def test_nothing_that_an_index_names_is_run(tmp_path, function):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(function, str(tmp_path / "made"))))
    with pytest.raises(Fp8Error, match="which no index holds"):
        read_metadata(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_function_is_not_found_through_a_module_that_imports_its_own(tmp_path):
    """Protocol 4 finds "os.mkdir" in the module of the metadata, because that module imports os."""
    name, module = b"os.mkdir", Metadata.__module__.encode()
    made = os.fsencode(tmp_path / "made")
    strings = [b"\x8c" + bytes([len(text)]) + text for text in (module, name, made)]
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + strings[0] + strings[1] + b"\x93" + strings[2] + b"\x85R.")
    with pytest.raises(Fp8Error, match="which no index holds"):
        read_metadata(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_missing_index_is_told(tmp_path):
    with pytest.raises(Fp8Error, match="holds no whole checkpoint"):
        read_metadata(tmp_path / "nowhere")
