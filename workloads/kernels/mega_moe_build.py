"""Builds `mega_moe_sm90.cu` with nvcc at its first use and loads it.

The library is kept under the user's cache by the hash of its sources and the compiler's version, so that ranks and
later runs share it.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_name("mega_moe_sm90.cu")
HEADER = "mega_moe_wgmma.cuh"
COLUMNS = (8, 16, 24, 32, 48, 56, 64, 80, 96)  # tokens that one instruction takes
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC")
BUILD_SECONDS = 600


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@cache
def compiled(tokens: int) -> ctypes.CDLL:
    """The compiled kernels for tiles of at most `tokens` tokens, 32 or 224.

    Raises RuntimeError without nvcc, or with its output when it refuses the source.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "The MegaMoE kernels of Hopper are compiled at their first use, and no nvcc is on the PATH: install the "
            "CUDA toolkit of torch's CUDA version, or set backend.moe_kernel=reference."
        )
    version = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    header = wgmma_header()
    key = hashlib.sha256(
        "\0".join([SOURCE.read_text(), header, version, *FLAGS, str(tokens)]).encode()
    ).hexdigest()[:16]
    target = _cache_folder() / f"mega_moe_sm90-{tokens}-{key}.so"
    if not target.exists():
        _build(nvcc, tokens, header, target)
    loaded = ctypes.CDLL(str(target))
    loaded.mega_moe_error.restype = ctypes.c_char_p
    return loaded


def wgmma_header() -> str:
    """`wgmma<N>(d, a0, a1, a2, a3, b, accumulate)`: D[64, N] (+)= A[64, 32] x B[32, N], A of E5M2 in registers, B of
    E4M3 behind a descriptor of shared memory, D in FP32 with N/2 registers a thread."""
    functions = [_wgmma(columns) for columns in COLUMNS]
    return "\n".join(
        [
            "#pragma once",
            "template <int kN>",
            "__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint32_t a0, uint32_t a1, uint32_t a2, "
            "uint32_t a3, uint64_t b, int accumulate);",
            *functions,
            "",
        ]
    )


def _wgmma(columns: int) -> str:
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""template <>
__device__ __forceinline__ void wgmma<{columns}>(
    float (&d)[{count}], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e5m2.e4m3 "
        "{{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1;\\n}}"
        : {outputs}
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}}"""


def _build(nvcc: str, tokens: int, header: str, target: Path) -> None:
    """Compiles into a folder of its own and moves the result, so that ranks that build at once cannot mix."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as folder:
        (Path(folder) / HEADER).write_text(header)
        made = Path(folder) / target.name
        command = [nvcc, *FLAGS, f"-DTOKENS={tokens}", "-I", folder, "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        if done.returncode:
            raise RuntimeError(f"nvcc could not compile {SOURCE.name}: {done.stderr.strip() or done.stdout}")
        made.replace(target)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "refit-orchestrator"
