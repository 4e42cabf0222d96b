"""The text model: an ordinary decoder whose attention has sinks."""

from workloads.models.dense.model import DenseForCausalLM
from workloads.models.openpangu.attention import SinkAttention, refresh_sinks
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.served import Setting


class OpenPanguForCausalLM(DenseForCausalLM):
    """A root of its own, or within the vision wrapper."""

    def __init__(self, setting: Setting[OpenPanguConfig]) -> None:
        super().__init__(setting, setting.config.prefix, SinkAttention)

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        refresh_sinks(self)
