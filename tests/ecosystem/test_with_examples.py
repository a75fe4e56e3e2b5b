"""Every example runs as its docstring says, and its loss falls."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "train_fsdp2.py": [*TORCHRUN, "train_fsdp2.py", "--steps", "8"],
    "train_fsdp2.py, HSDP": [*TORCHRUN, "train_fsdp2.py", "--steps", "8", "--replicas", "2", "--recipe", "rowwise"],
    "accelerate_transformers.py, alone": [sys.executable, "accelerate_transformers.py"],
    "accelerate_transformers.py": [*TORCHRUN, "accelerate_transformers.py"],
    "lightning_module.py, alone": [sys.executable, "lightning_module.py"],
    "lightning_module.py": [sys.executable, "lightning_module.py", "--devices", "2"],
}
SECONDS = 150
# the first needs nothing of others, but runs with them, in `nox -s ecosystem`
NEEDS = {"accelerate_transformers.py": ("accelerate", "transformers")}


def test_every_example_has_a_command():
    # tests/test_benchmarks.py runs the comparisons, test_with_maxtext.py what needs MaxText
    jobs = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith(("_", "compare_", "maxtext_"))}
    assert jobs == {name.partition(",")[0] for name in COMMANDS}


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_runs_and_its_loss_falls(name):
    for package in NEEDS.get(name.partition(",")[0], ("lightning",)):
        pytest.importorskip(package, reason=f"{package} is not installed: `nox -s ecosystem` installs it")
    code, output, errors = run(COMMANDS[name])
    assert code == 0, output[-2000:] + errors
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) >= 2, output
    assert losses[-1] < losses[0]
    assert "fp8" in output or "float8" in output


def run(command: list[str], seconds: float = SECONDS) -> tuple[int, str, str]:
    """Return the exit status, output and errors of `command`; after `seconds` with the stack of each process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=EXAMPLES, env=environment, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            import psutil

            # The handler of this signal prints the stacks, one process after another. torchrun sleeps meanwhile,
            # because it ends all ranks as soon as one has died.
            root = psutil.Process(process.pid)
            root.suspend()
            for one in [*root.children(recursive=True), root]:
                one.send_signal(signal.SIGABRT)
                time.sleep(1)
            root.resume()
            output, errors = process.communicate()
    return process.returncode, output, errors


@pytest.mark.distributed
def test_of_an_example_that_hangs_the_stacks_of_all_ranks_are_told(tmp_path, full):
    if not full:
        pytest.skip("it waits for processes that hang: with --full")
    pytest.importorskip("psutil", reason="psutil is not installed: `nox -s ecosystem` installs it")
    script = tmp_path / "hangs.py"
    script.write_text("import time\n\ndef waits():\n    time.sleep(60)\n\nwaits()\n")
    code, _, errors = run([*TORCHRUN, str(script)], seconds=20)
    assert code != 0
    assert errors.count("in waits") == 2, errors


def test_the_slurm_script_starts_an_example_that_exists():
    script = EXAMPLES / "train_fsdp2.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    ((name, options),) = re.findall(r"examples/(\S+\.py)(.*)", script.read_text())
    assert name == "train_fsdp2.py"
    options = re.findall(r"(--[a-z]+)", options)
    assert {"--dim", "--layers", "--replicas"} <= set(options)
    source = (EXAMPLES / name).read_text()
    assert [option for option in options if f'"{option}"' not in source] == []
