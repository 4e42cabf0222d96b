"""The model's hook walks over all layers of the model, and asks one that is of another pipeline stage."""

from workloads.faults import LoaderFault
from workloads.faults._about import CRASH, About

ABOUT = About("J", ("vllm#32511", "sglang#6908"), CRASH, via=("safetensors",), needs=("stages",))


class Fault(LoaderFault):
    def finalize(self) -> None:
        super().finalize()
        layers = {path.split(".")[2] for path, _ in self.root.named_modules() if path.count(".") >= 2}
        last = max((int(layer) for layer in layers if layer.isdecimal()), default=-1)
        for layer in range(last + 1):
            self.root.get_submodule(f"model.layers.{layer}")
