"""The plan for a GPU as far as it runs without one: planted faults, what is written when, the table, the record."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed: the plan asks for its version")

from benchmarks import _gpu_nccl as ask_nccl
from benchmarks import _gpu_parts as ask
from benchmarks import gpu
from fsdp_models import mesh_of
from tests.helpers.ranks import on_ranks
from tests.helpers.repository import ROOT

FAULTS = """
import os, subprocess, sys, time

def good(report, argument):
    report.claim("works", True, "it ran")

def hangs(report, argument):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report.figure("child", child.pid)
    time.sleep(600)

def dies(report, argument):
    report.claim("before the end", False, "it ran")
    print("illegal memory access, planted", flush=True)
    os._exit(7)
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A module of parts that fail, each in its way; the time of one that hangs is up as soon as it does."""
    (tmp_path / "planted_faults.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))

    class Impatient(subprocess.Popen):
        def wait(self, timeout=None):
            output = Path(self.args[self.args.index("--output") + 1])
            while timeout and output.stem == "hangs" and not (output.exists() and "child" in output.read_text()):
                time.sleep(0.05)
            return super().wait(0.1 if output.stem == "hangs" and timeout else timeout)

    names = {"Popen": Impatient, "STDOUT": subprocess.STDOUT, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(**names))
    import planted_faults

    return planted_faults


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_part_that_hangs_or_dies_costs_its_own_results_alone(faults, tmp_path, monkeypatch):
    """Each claim that was made before the fault stays, and what the process said is kept."""
    parts = [
        gpu.Part("dies", 60, ("before the end", "after it"), faults.dies),
        gpu.Part("hangs", 1, ("never",), faults.hangs),
        gpu.Part("last", 60, ("works",), faults.good),
    ]
    run_part, seen, allowed = gpu.run_part, [], {}

    def watched(part, seconds, folder, **options):
        seen.append(sorted(path.name for path in (tmp_path / "out").glob("*.json")))
        allowed[part.name] = max(60, seconds)
        return run_part(part, allowed[part.name], folder, **options)

    monkeypatch.setattr(gpu, "run_part", watched)
    result = gpu.run_plan(parts, 121 / 60, tmp_path / "out", on_gpu=False)["parts"]
    assert seen == [[], *[["gpu-pretended.json"]] * 2], "it is written after each part"
    assert allowed["last"] > 60, "what a part does not need is given to the next ones"
    ended = ["ended with status 7", f"stopped after {allowed['hangs']:.0f} s", "finished"]
    assert [found["ended"] for found in result.values()] == ended
    assert "illegal memory access, planted" in result["dies"]["failures"]["ended with status 7"]
    deadline = time.monotonic() + 20
    while alive(result["hangs"]["figures"]["child"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(result["hangs"]["figures"]["child"]), "its whole group is ended"
    rows = gpu.verdicts(parts, {"parts": result}, on_gpu=True)
    said = [("dies", "refuted"), ("dies", "not reached"), ("hangs", "not reached"), ("last", "proved")]
    assert [(part, verdict) for part, _, verdict, _ in rows] == said
    assert {row[2] for row in gpu.verdicts(parts, {"parts": result}, on_gpu=False)} == {"pretended", "not reached"}
    written = (tmp_path / "out/gpu-pretended.md").read_text()
    assert f"| hangs | never | not reached | {ended[1]} |" in written
    again = gpu.run_plan(parts[2:], 1, tmp_path / "out", on_gpu=False)["parts"]
    assert [found["ended"] for found in again.values()] == ended, "what is asked again replaces its own part alone"


def test_the_plan_asks_about_bits_before_speed_and_ends_in_nine_minutes():
    names = [part.name for part in gpu.plan()]
    assert names[:3] == ["rates", "bits", "two ranks"]
    assert len(set(names)) == len(names)
    assert 8 * 60 <= sum(part.seconds for part in gpu.plan() if not part.asked) <= 9 * 60
    assert [place for place in ask.TESTS.values() if not (ROOT / place).exists()] == []


@pytest.mark.timeout(1800)
def test_every_part_has_a_twin_on_a_cpu_that_reaches_its_claims(tmp_path, full, monkeypatch, capsys):
    """One part; all parts with --full."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # that of the process that runs the tests stays
    some = [part.name for part in gpu.plan()] if full else ["te-init"]
    code = gpu.main(["--pretend", "--results", str(tmp_path), "--minutes", "30", "--only", *some])
    said, table = capsys.readouterr().out, (tmp_path / "gpu-pretended.md").read_text()
    assert code == 0, said
    result = json.loads((tmp_path / "gpu-pretended.json").read_text())
    assert all(part["ended"] == "finished" for part in result["parts"].values())
    assert table in said
    assert "not reached" not in table


def test_one_gpu_is_told_that_nccl_needs_two(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    report = ask.Report(tmp_path / "nccl.json", on_gpu=True)
    ask_nccl.nccl(report, "")
    (part,) = [part for part in gpu.plan() if part.name == "nccl"]
    found = {"parts": {"nccl": json.loads((tmp_path / "nccl.json").read_text()) | {"ended": "finished"}}}
    rows = gpu.verdicts([part], found, on_gpu=True)
    assert len(rows) == 1 + 4 * len(ask_nccl.SETUPS)
    assert {row[2:] for row in rows} == {("not reached", "needs 2 GPUs, this machine has 1")}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_a_byte_that_arrives_wrong_is_seen_under_nccl(rank, recipe):
    """Over gloo in its place: collectives, the first output and the trained shards differ."""
    device, sizes, mesh = torch.device("cpu"), ask_nccl.Sizes(3, 64, 32), mesh_of()
    assert ask_nccl.collectives(device, rank)
    sound, nbytes, output = ask_nccl.train(recipe, mesh, device, sizes)
    assert nbytes == 2.0
    with torch.no_grad():
        alone = ask_nccl.build(recipe, None, device, sizes)(ask_nccl.batch(rank, 0, device, sizes))
    assert torch.equal(output, alone)

    def spoiled(gather):
        def wrong(*given, **options):
            work = gather(*given, **options)
            if work is not None:
                work.wait()
            gathered = given[0] if given else next(value for key, value in options.items() if "output" in key)
            gathered.view(-1).view(torch.uint8)[5] ^= 8
            return work

        return wrong

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_into_tensor", "all_gather_single"):  # FSDP2 calls the second from torch 2.15 on
            if hasattr(dist, name):
                patch.setattr(dist, name, spoiled(getattr(dist, name)))
        assert not ask_nccl.collectives(device, rank)
        broken, _, other = ask_nccl.train(recipe, mesh, device, sizes)
    assert not torch.equal(output, other)
    assert not all(map(torch.equal, sound, broken))


def test_a_cpu_refutes_programs_and_no_speeds():
    failed = "layers: every test passes"
    part = gpu.Part("bits", 1, (failed, ask.FASTER), ask.tests)
    claims = {claim: {"holds": False, "shown": "why"} for claim in part.claims}
    rows = gpu.verdicts([part], {"parts": {"bits": {"claims": claims, "ended": "finished"}}}, on_gpu=False)
    assert [row[2] for row in rows] == ["refuted", "pretended"]


@pytest.mark.parametrize(("holds", "verdict"), [(True, "not reached"), (False, "refuted")])
def test_a_part_that_was_cut_off_does_not_say_that_every_test_passes(holds, verdict):
    part = gpu.Part("bits", 1, ("layers: every test passes",), ask.tests)
    found = {"claims": {part.claims[0]: {"holds": holds, "shown": "some"}}, "ended": "stopped after 9 s"}
    ((*_, said, shown),) = gpu.verdicts([part], {"parts": {"bits": found}}, on_gpu=True)
    assert (said, shown) == (verdict, "some; stopped after 9 s")


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "under xdist"])
def test_every_test_is_recorded_at_once_and_a_lost_gpu_ends_its_process(tmp_path, workers):
    """xdist goes on in another process; alone, what was recorded stays."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('waits', 3)\n"
        "def test_bad(): assert False, 'x' * 5000 + 'the end'\n"
        "@pytest.mark.skip(reason='no')\n"
        "def test_left(): pass\n"
        "def test_lost(): raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "def test_after(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "no:cacheprovider", "-p", "benchmarks._gpu_record", "--record", tmp_path / "lines.jsonl"]
    options += [*workers, "--rootdir", tmp_path, "-c", tmp_path / "pytest.ini", tmp_path / "test_some.py"]
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, check=False, timeout=170)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    own = {line["test"].rpartition("::")[2]: line for line in lines}
    assert len(own) == len(lines), "nothing is recorded twice"
    ended = {"test_good": "passed", "test_bad": "failed", "test_left": "skipped", "test_lost": "failed"}
    after = {"test_after": "passed"} if workers else {}
    assert {name: line["outcome"] for name, line in own.items()} == ended | after
    assert own["test_good"]["noted"] == {"waits": 3}
    assert own["test_bad"]["message"].endswith("Error\n") or "the end" in own["test_bad"]["message"]
    assert len(own["test_bad"]["message"]) <= 3000
    assert "illegal memory access" in own["test_lost"]["message"]


def test_what_tests_recorded_becomes_claims(tmp_path):
    record, place = tmp_path / "lines.jsonl", ask.TESTS["experts"]
    report = ask.Report(tmp_path / "bits.json", on_gpu=True)
    files = {name: ask.TESTS[name] for name in ("layers", "experts")}
    ask.counted(report, files, record)
    assert report.found["claims"] == {}, "nothing was reached"
    lines = [
        {"test": f"{place}::one", "outcome": "passed", "seconds": 1, "noted": {"waits": 0}},
        {"test": f"{place}::two", "outcome": "failed", "seconds": 1, "message": "why"},
        {"test": f"{place}::three", "outcome": "skipped", "seconds": 1},
    ]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ask.counted(report, files, record)
    found = json.loads((tmp_path / "bits.json").read_text())
    (claim,) = found["claims"].items()
    assert claim == ("experts: every test passes", {"holds": False, "shown": "1 passed, 1 failed"})
    assert found["failures"] == {f"{place}::two": "why"}
    assert found["figures"] == {f"{place}::one": {"waits": 0}}
