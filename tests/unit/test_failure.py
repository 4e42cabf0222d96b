"""Of many reports the one that began it is told, with the rank, and the others are not."""

import errno
from pathlib import Path
from typing import Any

import pytest

from orchestrator.failure import AttemptError, first_failure, unkillable

FOLDERS = {"candidate": Path("/nowhere")}


def exited(rank: int, time: float, error: dict | None = None, **values: Any) -> dict[str, Any]:
    ended = {"kind": "rank_exited", "gang": "candidate", "node": rank // 4, "rank": rank, "time": time}
    return {**ended, "code": 1, "signal": None, "stopped": False, "error": error, "stacks_at": None, **values}


def report(
    type_: str, message: str, time: float, code: int | None = None, path: str | None = None
) -> dict[str, Any]:
    return {"type": type_, "message": message, "traceback": "...", "errno": code, "path": path, "time": time}


def told(*events: dict[str, Any]) -> AttemptError:
    found = first_failure(events, FOLDERS)
    assert found is not None
    return found


def lost(time: float) -> dict[str, Any]:
    return report("RuntimeError", "[pair.cc:541] Connection closed by peer [127.0.0.1]:26217", time)


def test_gang_that_ended_well_or_was_stopped_has_no_failure() -> None:
    stopped = exited(2, 3.0, stopped=True, code=None, signal="SIGKILL")
    assert first_failure([exited(0, 1.0, code=0), exited(1, 2.0, code=0), stopped], FOLDERS) is None


def test_what_the_launcher_lost_comes_before_complaints_and_after_an_earlier_death() -> None:
    gone = {"kind": "launch_failed", "type": "node_lost", "message": "gone", "node": 1, "time": 5.0}
    complaint, death = exited(0, 3.0, lost(2.0)), exited(3, 4.0, code=None, signal="SIGKILL")
    assert told(gone).failure.type == "node_lost"
    assert (told(complaint, gone).failure.type, told(complaint, gone).failure.node) == ("node_lost", 1)
    assert told(complaint, gone, death).failure.type == "rank_killed"
    assert told({**gone, "time": 3.5}, death).failure.type == "node_lost"


def test_complaints_about_others_that_came_first_are_not_the_cause() -> None:
    error = told(
        exited(0, 1.0, lost(0.9)), exited(1, 1.1, lost(0.8)), exited(5, 1.2, report("KeyError", "'w1'", 0.95))
    )
    assert (error.failure.type, error.failure.rank, error.failure.node) == ("rank_failed", 5, 1)
    assert error.failure.message == "KeyError: 'w1'"


@pytest.mark.parametrize(
    "leaving",
    [
        {"error": report("KeyError", "'w1'", 0.8), "signal": "SIGTERM", "code": None},
        {"error": None, "code": 7},
        {"error": None, "code": None, "signal": "SIGSEGV"},
    ],
)
def test_rank_that_was_leaving_when_all_were_told_to_stop_is_the_cause(leaving: dict[str, Any]) -> None:
    error = told(
        exited(0, 1.0, lost(0.9)),
        exited(1, 1.1, stopped=True, code=None, signal="SIGTERM"),
        exited(2, 1.2, lost(0.7), stopped=True),
        exited(5, 1.3, stopped=True, **leaving),
    )
    assert (error.failure.type, error.failure.rank, error.failure.node) == ("rank_failed", 5, 1)


@pytest.mark.parametrize(
    "message",
    [
        "[pair.cc:541] Connection closed by peer [127.0.0.1]:26217",
        "[buffer.cc:78] Timed out waiting 600000ms for recv operation to complete",
        "Gloo connectFullMesh failed with [pair.cc:144] no error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_each_form_of_a_complaint_gives_way_to_a_later_death(message: str) -> None:
    complaint = exited(0, 1.0, report("DistBackendError", message, 0.9))
    error = told(complaint, exited(7, 2.0, code=None, signal="SIGKILL"))
    assert (error.failure.type, error.failure.rank) == ("rank_killed", 7)


def test_own_error_that_speaks_of_a_timeout_is_still_an_own_error() -> None:
    error = told(exited(3, 1.0, report("ValueError", "the reload timed out", 0.9)), exited(0, 2.0, lost(1.5)))
    assert (error.failure.type, error.failure.rank) == ("rank_failed", 3)


def test_of_two_own_errors_the_earlier_one_is_told_whatever_the_order_of_exits() -> None:
    late, early = report("ValueError", "late", 5.0), report("ValueError", "early", 4.0)
    error = told(exited(0, 5.1, late), exited(9, 5.2, early))
    assert (error.failure.rank, error.failure.message) == (9, "ValueError: early")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_names_the_file(code: int) -> None:
    error = told(exited(2, 1.0, report("OSError", "no space", 0.9, code, "/store/tensors-00002.jsonl")))
    assert error.failure.type == "disk_full"
    assert "/store/tensors-00002.jsonl" in error.failure.message


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 34 bytes.",
        ),
    ],
)
def test_out_of_memory_has_a_type_of_its_own(type_: str, message: str) -> None:
    assert told(exited(2, 1.0, report(type_, message, 0.9))).failure.type == "out_of_memory"


def test_only_complaints_point_at_the_node_that_said_nothing() -> None:
    started = [
        {"kind": "rank_started", "gang": "candidate", "node": rank // 4, "rank": rank} for rank in range(8)
    ]
    complaints = [exited(rank, 1.0, lost(0.9)) for rank in range(4)]
    error = told(*started, *complaints)
    assert (error.failure.type, error.failure.rank, error.failure.node) == ("node_lost", 4, 1)
    assert "[4, 5, 6, 7]" in error.failure.message


def test_a_node_that_is_silent_as_a_whole_is_the_lost_one() -> None:
    """The launcher ends ranks of other nodes too, some of them before they can report."""
    started = [
        {"kind": "rank_started", "gang": "candidate", "node": rank // 4, "rank": rank} for rank in range(16)
    ]
    silent = (6, 9, 12, 13, 14, 15)
    complaints = [exited(rank, 1.0, lost(0.9)) for rank in range(16) if rank not in silent]
    error = told(*started, *complaints)
    assert (error.failure.type, error.failure.rank, error.failure.node) == ("node_lost", 12, 3)
    assert "[12, 13, 14, 15]" in error.failure.message


def test_only_complaints_of_all_are_a_lost_connection() -> None:
    started = [{"kind": "rank_started", "gang": "candidate", "node": 0, "rank": rank} for rank in range(2)]
    error = told(*started, exited(1, 1.0, lost(0.8)), exited(0, 1.1, lost(0.9)))
    assert (error.failure.type, error.failure.rank) == ("connection_lost", 1)


def test_node_parent_that_fails_is_told_before_its_ranks() -> None:
    failed = {
        "kind": "node_failed",
        "node": 2,
        "error": report("OSError", "x", 1.0, errno.ENOSPC, "/rank.log"),
    }
    error = told(exited(0, 0.5, lost(0.4)), failed)
    assert (error.failure.type, error.failure.node) == ("disk_full", 2)


def test_process_that_cannot_be_killed_makes_its_node_the_one_at_fault() -> None:
    left = {"kind": "rank_unkillable", "gang": "candidate", "node": 2, "rank": 9, "pid": 77, "time": 5.0}
    error = unkillable([exited(0, 1.0, lost(0.9)), left | {"state": "waits in the kernel (state D)"}])
    assert error is not None
    assert (error.failure.type, error.failure.rank, error.failure.node) == ("node_failed", 9, 2)
    assert "It waits in the kernel (state D)." in error.failure.message
    assert unkillable([exited(0, 1.0)]) is None


NUMA = "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers."
SAID = [
    ("Fatal Python error: Illegal instruction", "ONEDNN_MAX_CPU_ISA=AVX512_CORE", "rank_failed"),
    (
        "!!!!!!! Segfault encountered !!!!!!!\n"
        '  File "./signal/../sysdeps/unix/sysv/linux/x86_64/libc_sigaction.c", line 0, in 0x00007f838d45a04f\n'
        '  File "/tmp/vllm/csrc/cpu/cpu_fused_moe.cpp", line 242, in fused_moe_impl<float, float, cpu_micro_gemm::Mic'
        + '\n  File "Python/ceval.c", line 5376, in _PyEval_EvalFrameDefault'
        * 500,
        "set parallelism.ep=1",
        "rank_failed",
    ),
    ("!!!!!!! Segfault encountered !!!!!!!", "the frames in its log", "rank_failed"),
    (NUMA, "VLLM_CPU_OMP_THREADS_BIND", "rank_failed"),
    (
        "ModuleNotFoundError: No module named 'workloads'",
        "cannot import the code that travels with it",
        "rank_failed",
    ),
    (
        "Value error, Model architectures ['XForCausalLM'] are not supported for now.",
        "architecture",
        "rank_failed",
    ),
    ("model type `x` but Transformers does not recognize this architecture.", "architecture", "rank_failed"),
    (
        "target_hidden_states = self.model.combine_hidden_states(\n"
        "RuntimeError: shape '[-1, 768]' is invalid for input of size 69632",
        "eagle_aux_hidden_state_layer_ids",
        "rank_failed",
    ),
    ("RuntimeError: Cannot find any model weights with `/weights`", "checkpoint is missing", "rank_failed"),
    (
        "FileNotFoundError: Weight files referenced in index but missing: {'/w/x'}",
        "is missing",
        "rank_failed",
    ),
    ("SafetensorError: Error while deserializing header", "missing or broken", "rank_failed"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "the GPU itself failed", "gpu_failed"),
    ("[c10d] The server socket has failed to listen: EADDRINUSE", "has taken a port", "rank_failed"),
    (
        "RuntimeError: [enforce fail] can't allocate memory: 3 bytes",
        "VLLM_CPU_KVCACHE_SPACE",
        "out_of_memory",
    ),
    ("ValueError: No available memory for the cache blocks.", "VLLM_CPU_KVCACHE_SPACE", "out_of_memory"),
    (
        "ValueError: To serve at least one request with the model's max seq len (4096), (0.5 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.1 GiB). Try increasing `gpu_memory_utilization`",
        "no room for one request of backend.max_model_len tokens",
        "out_of_memory",
    ),
    (
        "ValueError: Available memory on node 0 (3.1/23.4 GiB) on startup is less than desired CPU memory utilization "
        "(0.9, 21.1 GiB).",
        "memory ran out",
        "out_of_memory",
    ),
    (
        "ValueError: No common block size for 7 (CPU_ATTN: [MultipleOf(32)]).",
        "leave backend.options.block_size out",
        "rank_failed",
    ),
    (
        "ValueError: Missing keys ('model.layers.0.self_attn.qkv_proj.weight', 'model.layers.0.mlp.down_proj.weight') "
        "in loaded state!",
        "packs linear layers behind kernel objects and empties their parameters",
        "rank_failed",
    ),
    (
        "AttributeError: 'QKVParallelLinear' object has no attribute 'cpu_linear'",
        "left out the post-processing",
        "rank_failed",
    ),
    (
        "RuntimeError: Cannot access accelerator device when none is available.",
        "asks for an accelerator",
        "rank_failed",
    ),
    (
        "  Value error, User-specified max_model_len (100000) is greater than the derived max_model_len "
        "(max_position_embeddings=2048.0 or model_max_length=None in model's config.json).",
        "lower it to what config.json says",
        "rank_failed",
    ),
    (
        "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'nonsense'",
        "an argument that this release of the engine does not have",
        "rank_failed",
    ),
]


@pytest.mark.parametrize(("said", "cause", "type_"), SAID, ids=[said[:60] for said, *_ in SAID])
def test_the_log_of_an_engine_tells_why_it_died(tmp_path: Path, said: str, cause: str, type_: str) -> None:
    """The engine's own exception only points at its workers' output."""
    (tmp_path / "rank-00001.log").write_text(f"INFO starting\n{said}\n" + "INFO shutting down\n" * 100)
    hidden = report("RuntimeError", "Engine core initialization failed. See root cause above.", 0.9)
    error = first_failure([exited(1, 1.0, hidden)], {"candidate": tmp_path})
    assert error is not None
    assert (error.failure.type, error.failure.rank) == (type_, 1)
    assert error.failure.message.startswith("RuntimeError: Engine core initialization failed.")
    assert "Likely cause: " in error.failure.message
    assert cause in error.failure.message
    assert error.failure.log_tail.endswith("INFO shutting down")


def test_a_rank_that_an_illegal_instruction_ended_says_which_setting_helps() -> None:
    error = told(exited(0, 1.0, code=None, signal="SIGILL"))
    assert error.failure.type == "rank_failed", "by what it did itself"
    assert "ONEDNN_MAX_CPU_ISA" in error.failure.message


def test_a_log_without_a_known_cause_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text("INFO all is well\n")
    error = first_failure([exited(0, 1.0, report("KeyError", "'w1'", 0.9))], {"candidate": tmp_path})
    assert error is not None
    assert error.failure.message == "KeyError: 'w1'"


def test_an_engine_that_lists_all_that_it_supports_does_not_hide_the_cause(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text("")
    said = f"Model architectures ['X'] are not supported for now. Supported: {['YForCausalLM'] * 1000}"
    error = first_failure([exited(0, 1.0, report("ValueError", said, 0.9))], {"candidate": tmp_path})
    assert error is not None
    shown = error.failure.message
    assert len(shown) < 2000
    assert "Model architectures ['X']" in shown
    assert "more characters in its stack) Likely cause: " in shown
