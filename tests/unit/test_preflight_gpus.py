"""What nvidia-smi prints becomes plain values, over its releases; a fake of it answers as the real one does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workloads.preflight import gpus

# Of a GB200 node, driver 580: two of its four GPUs.
GPUS = """\
0, GPU-3f0a7e52-0001-4a8e-9a51-6f1d0c3c2a10, NVIDIA GB200, 580.95.05, 97.00.82.00.2B, 189471, Enabled, 0, 2062, \
0x0000000000000001
1, GPU-3f0a7e52-0002-4a8e-9a51-6f1d0c3c2a11, NVIDIA GB200, 580.95.05, 97.00.82.00.2B, 189471, Enabled, 2, 2062, \
0x0000000000000040
"""
ROWS = """\
GPU-3f0a7e52-0001-4a8e-9a51-6f1d0c3c2a10, No, No
GPU-3f0a7e52-0002-4a8e-9a51-6f1d0c3c2a11, Yes, 0
"""
APPS = "GPU-3f0a7e52-0002-4a8e-9a51-6f1d0c3c2a11, 40122, python, 1024\n"
FULL = """\

==============NVSMI LOG==============

Driver Version                            : 580.95.05
CUDA Version                              : 13.0

Attached GPUs                             : 2
GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    GPU Fabric GUID                       : 0x1d08acf1c7d13a2d
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 32766
        ClusterUUID                       : 9c6a0a5e-3b52-4a5c-8f0e-6c6d1d1a7a01
        Health
            Bandwidth                     : Full
            Route Recovery in progress    : False
    Processes                             : None
    Capabilities
        State                             : Other

GPU 00000009:01:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : In Progress
        Status                            : N/A
        CliqueId                          : N/A
        ClusterUUID                       : N/A
    Processes                             : None
"""
# Of one GPU without ECC, row remapping and fabric, driver 525.
OLD_GPU = (
    "0, GPU-11, NVIDIA GeForce RTX 3090, 525.60.13, 94.02.42.00.B4, 24576, [N/A], [N/A], 2100, 0x0000000004\n"
)
OLD_ROWS = "GPU-11, [Not Supported], [Not Supported]\n"

Fake = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts an nvidia-smi first on the path. unknown: fields that it refuses, as that release does."""

    def make(
        gpu: str, rows: str, apps: str, full: str, unknown: tuple[str, ...] = (), fails: str = ""
    ) -> None:
        answers = {"query-gpu": gpu, "query-remapped-rows": rows, "query-compute-apps": apps}
        (tmp_path / "nvidia-smi").write_text(
            "#!/usr/bin/env -S python3 -IS\n"
            "import sys\n"
            f"answers, unknown, full, fails = {answers!r}, {unknown!r}, {full!r}, {fails!r}\n"
            "if fails: sys.exit(print(fails) or 9)\n"
            "if sys.argv[1] == '-q': sys.exit(print(full))\n"
            "what, _, fields = sys.argv[1].lstrip('-').partition('=')\n"
            "assert sys.argv[2] == '--format=csv,noheader,nounits', sys.argv\n"
            "bad = [f for f in fields.split(',') if f in unknown]\n"
            "if bad: sys.exit(print(f'Field \"{bad[0]}\" is not a valid field to query.\\n') or 2)\n"
            "print(answers[what], end='')\n"
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_health_processes_and_domain_of_each_gpu(fake: Fake) -> None:
    fake(GPUS, ROWS, APPS, FULL)
    found = gpus.look()
    assert found is not None
    first, second = found["gpus"]
    assert (first["name"], first["memory.total"], first["ecc.errors.uncorrected.volatile.total"]) == (
        "NVIDIA GB200",
        "189471",
        "0",
    )
    assert second["ecc.errors.uncorrected.volatile.total"] == "2"
    assert second["clocks_event_reasons.active"] == "0x0000000000000040"
    assert (first["remapped_rows.pending"], second["remapped_rows.pending"]) == ("No", "Yes")
    assert first["fabric"] == {
        "state": "Completed",
        "status": "Success",
        "cliqueid": "32766",
        "clusteruuid": "9c6a0a5e-3b52-4a5c-8f0e-6c6d1d1a7a01",
    }
    assert second["fabric"] == {"state": "In Progress", "status": None, "cliqueid": None, "clusteruuid": None}
    [process] = found["processes"]
    assert (process["pid"], process["process_name"], process["gpu_uuid"]) == (
        "40122",
        "python",
        second["uuid"],
    )
    json.dumps(found)


@pytest.mark.parametrize("visible", ["0", "GPU-3f0a7e52-0001"])
def test_gpus_of_other_jobs_are_not_looked_at(
    fake: Fake, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(GPUS, ROWS, APPS, FULL)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus.look()
    assert found is not None
    assert ([gpu["index"] for gpu in found["gpus"]], found["processes"]) == (["0"], [])


def test_an_older_release_has_other_names_and_says_less(fake: Fake) -> None:
    fake(OLD_GPU, OLD_ROWS, "", "GPU 00000000:01:00.0\n", unknown=("clocks_event_reasons.active",))
    found = gpus.look()
    assert found is not None
    [gpu] = found["gpus"]
    assert gpu["clocks_event_reasons.active"] == "0x0000000004"
    assert (gpu["ecc.mode.current"], gpu["remapped_rows.pending"], gpu["fabric"]) == (None, None, {})
    assert found["processes"] == []


def test_a_field_that_no_release_knows_is_none_and_the_others_are_read(fake: Fake) -> None:
    line = OLD_GPU.rpartition(",")[0] + "\n"
    fake(line, OLD_ROWS, "", "", unknown=("clocks_event_reasons.active", "clocks_throttle_reasons.active"))
    [gpu] = gpus.query("gpu", gpus.GPU_FIELDS)
    assert (gpu["clocks_event_reasons.active"], gpu["clocks.max.sm"]) == (None, "2100")


def test_a_driver_that_fails_and_an_answer_that_was_not_asked_for_are_errors(fake: Fake) -> None:
    fake(
        "", "", "", "", fails="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    )
    with pytest.raises(RuntimeError, match="ended with code 9: NVIDIA-SMI has failed"):
        gpus.look()
    fake("Unable to determine the device handle for GPU 0000:41:00.0\n", ROWS, APPS, FULL)
    with pytest.raises(RuntimeError, match="answered 'Unable to determine"):
        gpus.look()


def test_a_machine_without_nvidia_smi_has_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.look() is None
