"""What every script for whoever maintains vLLM says: its variables, its arguments, and where the weights come from."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

#: A weight transfer engine of a script's own, whose wire is a folder: the session around it is vLLM's, and so are the
#: loaders. It stands for the transports that need GPUs.
TRANSFER = """\
from dataclasses import dataclass
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
@dataclass
class Nothing: pass
@dataclass
class Folder: folder: str
class Transport(WeightTransferEngine):
    init_info_cls, update_info_cls = Nothing, Folder
    def init_transfer_engine(self, init_info): pass
    def start_weight_update(self): initialize_layerwise_reload(self.model)
    def update_weights(self, update_info): self.receive_weights(self.parse_update_info(update_info))
    def receive_weights(self, update_info):
        for file in sorted(glob.glob(update_info.folder + "/*.safetensors")):
            self.model.load_weights(load_file(file).items())
    def finish_weight_update(self): finalize_layerwise_reload(self.model, self.model_config)
    def shutdown(self): pass
if __name__ == "repro":  # in a worker, once
    WeightTransferEngineFactory.register_engine("repro", Transport)
"""


def environment(cell: Json) -> dict[str, str]:
    backend, tp = cell["backend"], cell["parallelism"]["tp"]
    own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if backend["device"] == "cpu":
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if tp == 1 else "|".join(map(str, range(tp)))
    return {**own, **backend["env"]}


def arguments(cell: Json) -> dict[str, Any]:
    backend = cell["backend"]
    return {
        "tensor_parallel_size": cell["parallelism"]["tp"],
        **({"enable_expert_parallel": True} if cell["parallelism"]["ep"] > 1 else {}),
        "dtype": backend["dtype"],
        "skip_tokenizer_init": True,
        "max_model_len": backend["max_model_len"],
        "max_num_batched_tokens": backend["max_batch_tokens"],
        "max_num_seqs": backend["max_requests"],
        **backend["options"],
    }


def weights(cell: Json, names: Sequence[str], dirs: Mapping[str, str]) -> Iterator[str]:
    """A line for each checkpoint: whose files they are, or the commands of this project that make them."""
    config = json.dumps(cell["model"].get(cell["model"]["architecture"], {}), separators=(",", ":"))
    made: set[str] = set()
    for name in names:
        checkpoint, folder = cell["checkpoints"][name], dirs[name]
        perturbed = checkpoint["perturbation"] != "none"
        given = checkpoint["path"]
        base = given or (_unperturbed(cell, checkpoint, dirs) or f"{folder}-base" if perturbed else folder)
        if base not in made:
            made.add(base)
            order = f"<(echo {shlex.quote(config)}) {checkpoint['seed']} {shlex.quote(base)}"
            made_by = f"python -m workloads.loading.transformers_checkpoint {order}"
            yield f"# weights: {f'the files in {given}' if given else made_by}"
        if perturbed:
            change = shlex.quote(json.dumps(checkpoint, separators=(",", ":")))
            places = f"{shlex.quote(base)} <(echo {change}) {shlex.quote(folder)}"
            yield f"# weights: python -m workloads.loading.materialize {places}"


def _unperturbed(cell: Json, checkpoint: Json, dirs: Mapping[str, str]) -> str | None:
    """Folder of the entry with the same seed that is used as it is."""
    for name, other in cell["checkpoints"].items():
        if other["path"] is None and other["seed"] == checkpoint["seed"] and other["perturbation"] == "none":
            return dirs[name]
    return None
