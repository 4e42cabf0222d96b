"""What a rank imported from elsewhere is no code of its arm: it is not observed, and the failure has a type."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from test_gang import toy_spec

from orchestrator.failure import first_failure
from workloads.imported import CodeError, require_own_code
from workloads.observer import RankObserver
from workloads.rank import failure_report


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of ours that another installation brought."""
    module = ModuleType("workloads.zeal")
    module.__file__ = str(tmp_path / "workloads" / "zeal.py")
    monkeypatch.setitem(sys.modules, "workloads.zeal", module)
    return Path(module.__file__)


def test_what_this_process_imported_is_its_own() -> None:
    require_own_code("")


def test_no_tensor_is_audited_where_a_module_is_of_another_tree(elsewhere: Path, tmp_path: Path) -> None:
    observer = RankObserver(cast(Any, None), toy_spec(tmp_path, "sum", 1), 0, auditor=cast(Any, None))
    with pytest.raises(CodeError, match=r"first of them workloads\.zeal: it was imported from") as caught:
        observer.tensors("started", "old")
    assert str(elsewhere) in str(caught.value)
    event = {"kind": "rank_exited", "gang": "candidate", "rank": 0, "node": 0, "code": 1, "signal": None}
    event |= {"stopped": False, "time": 1.0, "error": failure_report(caught.value)}
    error = first_failure([event], {"candidate": tmp_path})
    assert error is not None
    assert error.failure.type == "code"
