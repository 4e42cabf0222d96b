"""A weight transfer engine whose wire is a folder that all workers see.

It stands for the transports that need GPUs (NCCL, CUDA IPC): the session in the worker, the layerwise reload around
it and the loaders are vLLM's own.
"""

from dataclasses import dataclass, field
from typing import Any

from workloads.loading.checkpoint import open_checkpoint

NAME = "refit_files"


@dataclass
class NoInit:
    """Files need no handshake."""


@dataclass
class FilesUpdate:
    """One message: tensors `names` of the checkpoint in `folder`."""

    folder: str
    names: list[str] = field(default_factory=list)


def register() -> None:
    """Makes the engine known to vLLM, which looks for it by name when a worker has loaded its model."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class FilesEngine(WeightTransferEngine):  # type: ignore[misc]  # types are checked where there is no vLLM
        init_info_cls = NoInit
        update_info_cls = FilesUpdate

        def init_transfer_engine(self, init_info: NoInit) -> None:
            """Nothing to set up."""

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # vLLM's own then waits for an accelerator, which a CPU has not.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: FilesUpdate) -> None:
            """Each tensor arrives in memory that is gone after its turn, as a receive buffer is."""
            reader = open_checkpoint(update_info.folder)
            for name in update_info.names:
                self.model.load_weights([(name, reader.get(name).clone())])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Nothing is held."""

    WeightTransferEngineFactory.register_engine(NAME, FilesEngine)
