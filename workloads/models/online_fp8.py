"""Linear layers whose BF16 weights can be quantised to FP8 as they are loaded, layer by layer."""

from collections.abc import Iterator

import torch

from workloads.kernels.fp8_channels import channel_codes, channel_scales, dequantize_channels
from workloads.loading.weights import ModelRoot, Part, Rule, WeightModule, narrow

MIN_ROWS = 16  # smaller projections (scores, gates) stay as they are stored: nothing would be saved

RULES = (
    Rule("*.weight_fp8", "weight", "FP8 codes that a BF16 weight was quantised to as it was loaded"),
    Rule("*.weight_fp8_scale", "weight", "FP32 scale of each output channel of the same weight"),
)


class Matrix(WeightModule):
    """A linear layer with one parameter `weight` BF16 [N, K].

    With `quantized`, post-processing consumes it into `weight_fp8` float8_e4m3fn [N, K] and `weight_fp8_scale`
    FP32 [N]. A sharded K has the scales of its own columns, so results then depend on the layout.
    """

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.quantized = False
        self.weight_fp8: torch.Tensor | None = None
        self.weight_fp8_scale: torch.Tensor | None = None

    def matrix(self) -> torch.Tensor:
        """What the layer multiplies by: the BF16 weight, or float64 values of its FP8 codes."""
        if self.weight_fp8 is None or self.weight_fp8_scale is None:
            return self.weight
        return dequantize_channels(self.weight_fp8, self.weight_fp8_scale)

    def post_process(self) -> None:
        if self.quantized:
            weight = self.get_parameter("weight").detach()
            self.set_derived("weight_fp8", channel_codes(weight))
            self.set_derived("weight_fp8_scale", channel_scales(weight))
            self.consume("weight")

    def parts(self, path: str) -> Iterator[Part]:
        codes, scales = self.weight_fp8, self.weight_fp8_scale
        if codes is None or scales is None:
            yield from super().parts(path)
            return
        weight = self.weights["weight"]
        for placement in weight.placements:
            source, region, rows = placement.source, placement.source_region, placement.target[0]
            piece, scale = narrow(codes, placement.target), narrow(scales, (rows,))
            yield Part(f"{path}.weight_fp8", source, piece, source, region, read_as=channel_codes)
            yield Part(
                f"{path}.weight_fp8_scale", f"{source} scales", scale, source, region, read_as=channel_scales
            )
            for box in placement.padding(codes.shape):
                padding = narrow(codes, box)
                yield Part(f"{path}.weight_fp8", "padding", padding, padding_value=weight.creation_value)


def quantize_online(root: ModelRoot) -> None:
    """Have every matrix of a model quantised by the loads to come, but for those that something else is derived from,
    and small ones. Raises ValueError when there is none."""
    found = [
        module
        for _, module in root.weight_modules()
        if isinstance(module, Matrix)
        and type(module).post_process is Matrix.post_process
        and module.weights["weight"].shape[0] >= MIN_ROWS
    ]
    if not found:
        raise ValueError(
            f"backend.online_quantization is fp8, but {type(root).__name__} has no BF16 matrix that could be "
            "quantised while it is loaded: set it to none."
        )
    for module in found:
        module.quantized = True
