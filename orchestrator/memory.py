"""What one rank holds, part by part, from a model's dimensions: weights, kernel buffer, caches, peaks."""

import os
import shutil
import subprocess
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from orchestrator import mega_moe_memory
from orchestrator.config.schema import Root
from workloads.kernels.moe_choice import HOPPER, Choice
from workloads.loading.tensor_table import MXFP4_GROUP, bytes_by_component
from workloads.models.architectures import ARCHITECTURES, model_plan, tensor_table
from workloads.models.planning import DRAFTERS, Experts, Load, Part
from workloads.models.stages import stage_layers, staged
from workloads.spec import Backend, Parallelism, Step

EXPERT_ALIGNMENT = {"cpu": 128, "sm90": 128, "sm100": 512}  # of both expert dimensions under MegaMoE

# Beside weights and caches. CUDA: context, NCCL's channels, the activations of one batch, graph pools.
# CPU: the private pages of a forked process that works with torch.
RESERVE_BYTES = {"cuda": 6_000_000_000, "cpu": 200_000_000}


def memory_parts(root: Root) -> list[Part]:
    """Everything that one rank of a native engine holds at its fullest moment, largest weights first; of the pipeline
    stages, in the one that needs most."""
    return _parts_of_stage(root, fullest_stage(root))


def fullest_stage(root: Root) -> int:
    """The pipeline stage that needs most memory, the first of them."""
    return max(range(root.parallelism.pp), key=lambda stage: total(_parts_of_stage(root, stage)))


def _parts_of_stage(root: Root, stage: int) -> list[Part]:
    dimensions, layout, backend = _stage_dimensions(root, stage), root.parallelism, root.backend
    plan = model_plan(root.model.architecture)
    experts = _stage_experts(root, stage)
    parts = _weights(root, experts, stage)
    if experts is not None:
        parts += [*_expert_padding(experts, layout, backend), *_second_copies(experts, layout, backend)]
        if experts.drafter is not None:
            of_drafter = _expert_padding(experts.drafter, layout, backend)
            parts += [replace(part, name=f"drafter's {part.name}") for part in of_drafter]
    elsewhere = staged(root.model.architecture).derived_first if stage else ()
    parts += [part for part in plan.derived(dimensions, layout.tp) if part.name not in elsewhere]
    if experts is not None and backend.moe_kernel == "mega_moe":
        tensors = _expert_tensors(experts, layout, backend)
        parts += mega_moe_memory.parts(
            experts, layout, backend, padded_intermediate(experts, backend), tensors
        )
    load = Load(backend.max_requests, backend.max_requests * backend.max_model_len)
    reserve = Part(
        "reserve", "reserve", RESERVE_BYTES[backend.device], f"{backend.device} runtime, activations"
    )
    return [*parts, *plan.caches(dimensions, load, layout.tp), reserve]


def dimensions_of(root: Root) -> Any:
    """Of the model, which is one of `ARCHITECTURES`."""
    return getattr(root.model, root.model.architecture)


def _stage_dimensions(root: Root, stage: int) -> Any:
    """Of a model that has the layers of one pipeline stage only."""
    whole, stages = dimensions_of(root), root.parallelism.pp
    if stages == 1:
        return whole
    layers = stage_layers(whole.num_layers, stages, stage)
    return staged(root.model.architecture).part(whole, layers, stage == stages - 1)


def _stage_experts(root: Root, stage: int) -> Experts | None:
    """The routed experts of a stage; None where none of its layers has any."""
    experts = model_plan(root.model.architecture).experts(_stage_dimensions(root, stage))
    return experts if experts is not None and experts.layers else None


def planned_kernel(root: Root) -> Choice | None:
    """Of the routed experts, where the model of a native engine has any."""
    if root.model.architecture not in ARCHITECTURES:
        return None
    experts = model_plan(root.model.architecture).experts(dimensions_of(root))
    if experts is None:
        return None
    return mega_moe_memory.planned_kernel(experts, root.parallelism, root.backend)


def has_drafter(root: Root) -> bool:
    """Whether the model has a drafter, which is then a root of its own."""
    return any(getattr(dimensions_of(root), name, 0) > 0 for name in DRAFTERS)


def weight_bytes(root: Root) -> int:
    """Of a whole checkpoint."""
    return sum(_components(root, 1, 1).values())


def total(parts: list[Part], *kinds: str) -> int:
    """Bytes of the parts of these kinds, of all without any."""
    return sum(part.nbytes for part in parts if not kinds or part.kind in kinds)


def update_bytes(root: Root) -> int:
    """What an update needs on top of serving, for the expert parameters that finalising consumed, at most one layer
    at a time.

    Layerwise: fresh memory for all of them. Direct: the same without W2, which still lies in its loaded layout, but for
    our own kernel, which packs it, too.
    Expert by expert: one expert. Tensors that come neither layer by layer nor in the order of the model open layers
    before others are closed: up to all layers are open then.
    """
    each = (_stage_experts(root, stage) for stage in range(root.parallelism.pp))
    return max((_update_bytes(root, experts) for experts in each if experts is not None), default=0)


def _update_bytes(root: Root, experts: Experts) -> int:
    if root.backend.moe_kernel != "mega_moe":
        return 0
    w13, w13_scale, w2, w2_scale = _expert_tensors(experts, root.parallelism, root.backend)
    layer = w13 + w13_scale + w2 + w2_scale
    local = _local_slots(experts, root.parallelism)
    kept, packing = w2, 0
    if mega_moe_memory.planned_kernel(experts, root.parallelism, root.backend).kernel == HOPPER:
        kept = 0  # nothing that serves lies as it was loaded
        packing = mega_moe_memory.pack_bytes(experts, padded_intermediate(experts, root.backend))
    needs = {"layerwise": layer, "direct": layer - kept, "per_expert": layer // local}
    updates = [step for step in root.load_path.steps if step.do == "update"]
    return max((needs[s.via] * _layers_open(s, experts) + packing for s in updates), default=0)


def _layers_open(step: Step, experts: Experts) -> int:
    """Shuffled experts still come one by one, shuffled tensors of all layers at once."""
    return experts.layers if step.order == "shuffled" and step.via != "per_expert" else 1


def machine_bytes() -> int:
    """Memory of this machine, or of the container that limits it."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    found = [text for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([installed, *(int(text) for text in found)])


def machine_gpus() -> int:
    """NVIDIA GPUs that this machine shows to processes of CUDA: by its driver's files, or where a container hides them,
    by nvidia-smi; at most those that CUDA_VISIBLE_DEVICES names."""
    listed, devices = Path("/proc/driver/nvidia/gpus"), Path("/dev").glob("nvidia[0-9]*")
    found = max(len(list(listed.iterdir())) if listed.is_dir() else 0, len(list(devices)))
    if not found and (tool := shutil.which("nvidia-smi")):
        shown = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
        found = sum(line.startswith("GPU ") for line in shown.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([one for one in visible.split(",") if one.strip()]))


def padded_intermediate(experts: Experts, backend: Backend) -> int:
    """Intermediate size of the experts after padding for the kernel's tiles."""
    multiple = EXPERT_ALIGNMENT.get(backend.arch, 1) if backend.moe_kernel == "mega_moe" else 1
    return ceil(experts.intermediate / multiple) * multiple


def _weights(root: Root, experts: Experts | None, stage: int) -> list[Part]:
    layout, names = root.parallelism, model_plan(root.model.architecture).COMPONENTS
    by_component = _components(root, layout.tp, layout.ep, stage)
    whole = _components(root, 1, layout.ep, stage)
    basis = {name: _split(nbytes, whole[name], layout.tp) for name, nbytes in by_component.items()}
    if experts is not None:
        divided = f", split over TP{layout.tp}" if experts.padding and layout.ep == 1 < layout.tp else ""
        basis["routed_experts"] = f"{experts.count // layout.ep} of {experts.count} experts a layer{divided}"
    return [
        Part(names.get(name, name), "weights", nbytes, basis[name])
        for name, nbytes in sorted(by_component.items(), key=lambda item: -item[1])
    ]


def _split(local: int, whole: int, tp: int) -> str:
    if local == whole:
        return "replicated"
    return f"split over TP{tp}" if 2 * local <= whole else f"partly split over TP{tp}"


# A sweep asks for few models thousands of times.
_COMPONENTS: dict[tuple[str, int, int, int, int | None], dict[str, int]] = {}


def _components(root: Root, tp: int, ep: int, stage: int | None = None) -> dict[str, int]:
    """Bytes by component of what one rank of a pipeline stage holds; None: of the whole model, whatever the stages."""
    architecture, dimensions = root.model.architecture, dimensions_of(root)
    stages = 1 if stage is None else root.parallelism.pp
    key = repr(dimensions), tp, ep, stages, stage
    if key not in _COMPONENTS:
        sections = tensor_table(architecture).sections(dimensions)
        if stages > 1 and stage is not None:
            sections = staged(architecture).sections(dimensions, sections, stages, stage)
        _COMPONENTS[key] = bytes_by_component(sections, tp, ep)
    return _COMPONENTS[key]


def _expert_tensors(experts: Experts, layout: Parallelism, backend: Backend) -> tuple[int, int, int, int]:
    """Bytes of w13, its scales, w2, its scales of one layer's local experts in MXFP4, padded."""
    values = _local_slots(experts, layout) * padded_intermediate(experts, backend) * experts.hidden
    return values, 2 * values // MXFP4_GROUP, values // 2, values // MXFP4_GROUP


def _expert_padding(experts: Experts, layout: Parallelism, backend: Backend) -> list[Part]:
    if experts.padding is not None:
        return [experts.padding(layout.tp, layout.ep)]
    inner, padded = experts.intermediate, padded_intermediate(experts, backend)
    if padded == inner:
        return []
    only = replace(layout, redundant_experts=0)
    full = experts.layers * sum(_expert_tensors(experts, only, backend))
    basis = f"intermediate {inner} -> {padded}"
    return [Part("expert padding", "padding", full * (padded - inner) // padded, basis)]


def _local_slots(experts: Experts, layout: Parallelism) -> int:
    """Experts that lie on one rank, those that are there a second time included."""
    return (experts.count + layout.redundant_experts) // layout.ep


def _second_copies(experts: Experts, layout: Parallelism, backend: Backend) -> list[Part]:
    slots = _local_slots(experts, layout)
    added = slots - -(-experts.count // layout.ep)
    if not layout.redundant_experts:
        return []
    nbytes = experts.layers * sum(_expert_tensors(experts, layout, backend)) * added // slots
    basis = f"{slots} slots a layer, {layout.redundant_experts} of all ranks' for second copies"
    return [Part("redundant experts", "weights", nbytes, basis)]
