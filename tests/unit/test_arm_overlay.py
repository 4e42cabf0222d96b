"""Files laid over an arm: gated by the file that they replace, part of the cell's identity, and really what runs."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cell import cell_id
from orchestrator.config.compose import ConfigError
from orchestrator.config.freeze import freeze_overlay
from orchestrator.config.planning import plan
from orchestrator.config.schema import Arm, Overlaid, Root
from orchestrator.engine_env import package_folder
from orchestrator.failure import AttemptError
from orchestrator.provenance import checkout
from orchestrator.rules import code_rules
from orchestrator.show_where import code_lines
from orchestrator.store import Store
from orchestrator.trees import arm_source, is_kept, keep, overlaid_package, source_tree

AT = "workloads/loading/padding.py"
SMALL = ["load_path=cold", "collect=tensors", "cluster.memory_gb=2"]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "the tree"
    for folder in ("workloads", "collectors"):
        (tree / folder).mkdir(parents=True)
        (tree / folder / "__init__.py").write_text("")
    (tree / "workloads" / "a.py").write_text("value = 'old'\n")
    return tree


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    file = tmp_path / "my a.py"
    file.write_text("value = 'patched'\n")
    return file


def frozen(tree: Path, *overlay: Overlaid) -> dict[str, Any]:
    laid = freeze_overlay(Arm(path=str(tree), overlay=list(overlay)))
    return {"path": str(tree), "commit": None, "source": arm_source(tree, None, laid), "overlay": laid}


def sentences(arm: Arm, root: Root | None = None) -> list[str]:
    root = root or Root()
    root.code.candidate = arm
    return list(code_rules.problems(root))


def test_the_tree_with_the_file_over_it_is_made_and_the_tree_is_left_alone(
    tree: Path, patched: Path, tmp_path: Path
) -> None:
    over = Overlaid("workloads/a.py", str(patched), sha256(b"value = 'old'\n"))
    new = Overlaid("workloads/deep/new.py", str(patched))
    assert sentences(Arm(path=str(tree), overlay=[over, new])) == []
    arm = frozen(tree, over, new)
    made = source_tree(arm, Store(tmp_path / "store"))
    assert (made / "workloads" / "a.py").read_text() == "value = 'patched'\n"
    assert (made / "workloads" / "deep" / "new.py").is_file()
    assert (tree / "workloads" / "a.py").read_text() == "value = 'old'\n"
    assert source_tree(arm, Store(tmp_path / "store")) == made
    assert not list(made.parent.glob(".*")), "nothing half made is left"


def test_a_tree_in_the_store_that_was_changed_is_refused(tree: Path, patched: Path, tmp_path: Path) -> None:
    arm = frozen(tree, Overlaid("workloads/new.py", str(patched)))
    (source_tree(arm, Store(tmp_path / "store")) / "workloads" / "a.py").write_text("changed\n")
    with pytest.raises(AttemptError, match="have changed since the cell was frozen"):
        source_tree(arm, Store(tmp_path / "store"))


def test_a_file_that_changed_after_the_freeze_is_refused(tree: Path, patched: Path, tmp_path: Path) -> None:
    arm = frozen(tree, Overlaid("workloads/new.py", str(patched)))
    patched.write_text("other\n")
    with pytest.raises(AttemptError, match=r"laid over workloads/new\.py, is gone or has changed"):
        source_tree(arm, Store(tmp_path / "store"))
    patched.unlink()
    with pytest.raises(AttemptError, match="is gone or has changed"):
        source_tree(arm, Store(tmp_path / "store"))
    assert not list((tmp_path / "store").rglob("*.py"))


def test_what_is_kept_runs_whatever_becomes_of_the_tree(tree: Path, patched: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    plain = frozen(tree)
    laid = frozen(tree, Overlaid("workloads/a.py", str(patched), sha256(b"value = 'old'\n")))
    for arm in (plain, laid):
        keep(arm, store)
    (tree / "workloads" / "a.py").write_text("half of a new line")
    patched.unlink()
    assert (source_tree(plain, store) / "workloads" / "a.py").read_text() == "value = 'old'\n"
    assert (source_tree(laid, store) / "workloads" / "a.py").read_text() == "value = 'patched'\n"
    (source_tree(plain, store) / "workloads" / "a.py").write_text("changed\n")
    with pytest.raises(AttemptError, match=r"have changed since .* Remove this copy, which is made again"):
        source_tree(plain, store)
    keep(frozen_late := {**plain, "source": "another"}, store)
    assert not is_kept(frozen_late, store), "the tree is not what the cell froze"
    assert {path.name for path in (store.root / "trees").iterdir()} == {plain["source"], laid["source"]}


@pytest.mark.parametrize(
    ("at", "replaces", "said"),
    [
        ("workloads/a.py", "0" * 64, "replaces is 000000000000, but workloads/a.py of the arm's tree is "),
        ("workloads/a.py", None, "replaces is null, but workloads/a.py of the arm's tree is "),
        (
            "workloads/b.py",
            "0" * 64,
            "at is workloads/b.py, which is not in the arm's tree: set replaces=null",
        ),
        ("workloads/b.py", 12, "replaces is 12: give the SHA-256"),
        ("workloads", None, "at is 'workloads': name a file below workloads/, collectors/."),
        ("/workloads/a.py", None, "at is '/workloads/a.py': name a file below"),
        ("workloads/../orchestrator/x.py", None, "name a file below"),
        ("vllm/x.py", None, "name a file below workloads/, collectors/."),
    ],
)
def test_a_gate_that_does_not_hold_is_said(
    tree: Path, patched: Path, at: str, replaces: object, said: str
) -> None:
    [sentence] = sentences(Arm(path=str(tree), overlay=[Overlaid(at, str(patched), replaces)]))
    assert sentence.startswith("code.candidate.overlay[0].")
    assert said in sentence


def test_a_missing_file_and_two_at_one_place_are_said(tree: Path, patched: Path) -> None:
    arm = Arm(
        path=str(tree),
        overlay=[Overlaid("workloads/b.py", str(patched)), Overlaid("workloads/b.py", "/nowhere")],
    )
    found = sentences(arm)
    assert found[0] == "code.candidate.overlay puts two files at workloads/b.py: leave one."
    assert "overlay[1].file is '/nowhere', which is no file on this machine" in found[1]


def test_a_plan_takes_overlays_and_they_make_another_cell(patched: Path) -> None:
    base = checkout() / AT
    entry = f"{{at: {AT}, file: '{patched}', replaces: '{sha256(base.read_bytes())}'}}"
    plain = plan(SMALL).cells[0].cell
    laid = plan([*SMALL, f"code.candidate.overlay=[{entry}]"]).cells[0].cell
    assert cell_id(plain) != cell_id(laid)
    assert laid["labels"]["overlay"] == AT
    assert laid["code"]["base"] is None
    both = plan([*SMALL, f"code.base.overlay=[{entry}]"]).cells[0].cell
    assert both["code"]["base"]["source"] == laid["code"]["candidate"]["source"]
    assert list(code_lines(plain)) == []
    assert list(code_lines(laid)) == [f"  candidate runs {checkout()}, {patched} over {AT}"]
    assert list(code_lines(both)) == [
        f"  base runs {checkout()}, {patched} over {AT}",
        f"  candidate runs {checkout()}",
    ]
    with pytest.raises(ConfigError, match="your file was made from another one"):
        plan([*SMALL, f"code.candidate.overlay=[{{at: {AT}, file: '{patched}'}}]"])


@pytest.fixture(name="site")
def site_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An engine's package, found by this interpreter: vllm/__init__.py, vllm/core/{__init__,a,b}.py."""
    site = tmp_path / "site"
    (site / "vllm" / "core").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("")
    (site / "vllm" / "core" / "__init__.py").write_text("")
    (site / "vllm" / "core" / "a.py").write_text("from vllm.core import b\nvalue = 'old'\n")
    (site / "vllm" / "core" / "b.py").write_text("value = 'beside'\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    package_folder.cache_clear()
    yield site
    package_folder.cache_clear()


def vllm_root() -> Root:
    root = Root()
    root.backend.engine = "vllm"  # of this interpreter, as where backend.python is null
    return root


def test_a_file_over_the_engines_package_is_imported_with_the_rest_of_it(
    tree: Path, site: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.py"
    file.write_text("from vllm.core import b\nvalue = 'patched, ' + b.value\n")
    over = Overlaid("vllm/core/a.py", str(file), sha256((site / "vllm" / "core" / "a.py").read_bytes()))
    assert sentences(Arm(path=str(tree), overlay=[over]), vllm_root()) == []
    arm, store = frozen(tree, over), Store(tmp_path / "store")
    assert source_tree(arm, store) == tree
    package = overlaid_package(arm, sys.executable, store)
    assert package is not None
    code = (
        "import sys; from vllm.core.a import value; print(value);"
        "from workloads.imported import require_own_code; require_own_code(sys.argv[1])"
    )
    paths = f"{package}:{site}:{checkout()}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(package)],
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "patched, beside\n"), done.stderr
    # Without the folder on the path the installed package runs, and the proof fails.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(package)],
        env={"PYTHONPATH": f"{site}:{checkout()}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "CodeError: 4 modules of this process are not of its arm, the first of them vllm" in done.stderr


def test_a_package_that_is_another_one_on_the_node_is_refused(tree: Path, site: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("")
    over = Overlaid("vllm/core/a.py", str(file), sha256((site / "vllm" / "core" / "a.py").read_bytes()))
    arm = frozen(tree, over)
    (site / "vllm" / "core" / "a.py").write_text("another release\n")
    with pytest.raises(AttemptError, match=r"a.py is not what code.\*.overlay replaces"):
        overlaid_package(arm, sys.executable, Store(tmp_path / "store"))
    [sentence] = sentences(Arm(path=str(tree), overlay=[over]), vllm_root())
    assert "your file was made from another one" in sentence


def test_nothing_can_be_laid_over_an_engine_in_a_container_or_of_a_server(tree: Path, patched: Path) -> None:
    over = Overlaid("vllm/x.py", str(patched))
    contained, attached = vllm_root(), vllm_root()
    contained.cluster.image, attached.backend.url = "image", "http://localhost:1"
    for root, key in ((contained, "cluster.image"), (attached, "backend.url")):
        [sentence] = sentences(Arm(path=str(tree), overlay=[over]), root)
        assert f"{key} has the engine where nothing can be laid over it" in sentence
