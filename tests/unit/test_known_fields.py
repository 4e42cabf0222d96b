"""What a specification tells the code of an older commit."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from orchestrator.failure import AttemptError
from orchestrator.gangs.known_fields import told
from workloads import spec
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Step

ROOT = Path(spec.__file__).parents[1]
SPEC = GangSpec(
    name="candidate",
    output="/out",
    model=Model("k3", "kimi_k3", kimi_k3=KimiK3Config(num_layers=2)),
    parallelism=Parallelism(),
    backend=Backend(),
    checkpoints={"old": Checkpoint()},
    checkpoint_dirs={"old": "/old"},
    steps=[Step("start", "old", "safetensors")],
)


@pytest.fixture(name="older")
def older_fixture(tmp_path: Path) -> Path:
    """Code from before `backend.moe_kernel` and the config's `num_mtp_layers`."""
    for name, left_out in (
        ("spec.py", "moe_kernel"),
        ("models/kimi_k3/config.py", "num_mtp_layers"),
        ("models/dspark/config.py", ""),
    ):
        text = (ROOT / "workloads" / name).read_text()
        file = tmp_path / "older code" / "workloads" / name
        file.parent.mkdir(parents=True)
        file.write_text(re.sub(rf"^    {left_out}: .*$", "", text, flags=re.MULTILINE) if left_out else text)
    return tmp_path / "older code"


def test_our_own_code_is_told_everything() -> None:
    assert told(SPEC, ROOT) == asdict(SPEC)
    assert GangSpec.from_dict(told(SPEC, ROOT)) == SPEC


def test_older_code_is_not_told_of_what_it_does_not_know(older: Path) -> None:
    missing = told(SPEC, older)
    assert missing["backend"].keys() ^ asdict(SPEC.backend).keys() == {"moe_kernel"}
    assert missing["model"]["kimi_k3"].keys() ^ asdict(SPEC)["model"]["kimi_k3"].keys() == {"num_mtp_layers"}
    assert GangSpec.from_dict(missing) == SPEC


def test_what_older_code_cannot_do_is_not_left_out(older: Path) -> None:
    asked = replace(SPEC, backend=replace(SPEC.backend, moe_kernel="reference"))
    with pytest.raises(
        AttemptError, match=r"Backend.moe_kernel is 'reference', and the code below .* without that setting"
    ):
        told(asked, older)


def test_classes_that_lie_elsewhere_are_told_everything(tmp_path: Path) -> None:
    assert told(SPEC, tmp_path) == asdict(SPEC)
