"""Every example runs as its docstring says, and its loss falls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAINER = ["--use_cpu", "--max_steps=8", "--logging_steps=1", "--learning_rate=1e-2", "--report_to=none"]
COMMANDS = {
    "train_fsdp2.py": [*TORCHRUN, "train_fsdp2.py", "--steps", "8"],
    "train_fsdp2.py, HSDP": [*TORCHRUN, "train_fsdp2.py", "--steps", "8", "--replicas", "2", "--recipe", "rowwise"],
    "accelerate_transformers.py, alone": [sys.executable, "accelerate_transformers.py"],
    "accelerate_transformers.py": [*TORCHRUN, "accelerate_transformers.py"],
    "finetune_published.py": [*TORCHRUN, "finetune_published.py"],
    "transformers_trainer.py": [*TORCHRUN, "transformers_trainer.py", *TRAINER, "--output_dir", "OUT"],
    "lightning_module.py, alone": [sys.executable, "lightning_module.py"],
    "lightning_module.py": [sys.executable, "lightning_module.py", "--devices", "2"],
}
# the first needs nothing of others, but runs with them, in `nox -s ecosystem`
NEEDS = {
    "accelerate_transformers.py": ("accelerate", "transformers"),
    "finetune_published.py": ("transformers", "peft", "safetensors"),
    "transformers_trainer.py": ("accelerate", "transformers"),
}


def test_every_example_has_a_command():
    # tests/test_benchmarks.py runs the comparisons, test_with_maxtext.py and others what needs these
    others = ("_", "compare_", "maxtext_", "praxis_", "torchtitan_")
    jobs = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith(others)}
    assert jobs == {name.partition(",")[0] for name in COMMANDS}


@pytest.mark.distributed
@pytest.mark.timeout(210)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_runs_and_its_loss_falls(name, tmp_path):
    for package in NEEDS.get(name.partition(",")[0], ("lightning",)):
        pytest.importorskip(package, reason=f"{package} is not installed: `nox -s ecosystem` installs it")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(tmp_path) if word == "OUT" else word for word in COMMANDS[name]]
    done = subprocess.run(
        command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 2, done.stdout
    assert losses[-1] < losses[0]
    assert "fp8" in done.stdout.lower() or "float8" in done.stdout


def test_the_slurm_script_starts_an_example_that_exists():
    script = EXAMPLES / "train_fsdp2.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    ((name, options),) = re.findall(r"examples/(\S+\.py)(.*)", script.read_text())
    assert name == "train_fsdp2.py"
    options = re.findall(r"(--[a-z]+)", options)
    assert {"--dim", "--layers", "--replicas"} <= set(options)
    source = (EXAMPLES / name).read_text()
    assert [option for option in options if f'"{option}"' not in source] == []
