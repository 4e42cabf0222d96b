"""What a fault says of itself, and where it can be: plain data that the control side reads without torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: Kinds of failure, by the letters under which the project's notes on public reports collect them.
KINDS = {
    "A": "storage moved under a captured graph",
    "B": "derived state is stale",
    "C": "padding or uninitialised memory",
    "D": "loader lifecycle",
    "E": "processed twice",
    "F": "buffers and aliases",
    "G": "routing over ranks",
    "H": "names, ties, partial sets",
    "I": "numeric cast",
    "J": "the load path skips a hook",
    "K": "draft model",
    "L": "cache validity",
    "M": "transport",
    "N": "configuration drifts before a rebuild",
}
STARTS = ("safetensors", "dummy", "sharded_state", "tensorizer_raw")
RELOADS = ("layerwise", "direct", "per_expert")
#: What an update leaves out is stale, but where the weights were discarded there is nothing old to find.
DISCARDED = {"sleep2": "uninitialised"}
CRASH = "crash"  # instead of a finding: the attempt ends with the error of a rank

#: Small models by name, and what each has that can go wrong; `tests/native/test_fault_features.py` holds them to it.
FEATURES: dict[str, frozenset[str]] = {
    model: frozenset(words.split())
    for model, words in {
        "kimi_k3_tiny": "attributes buffers consumed_experts decay derivations draft e8m0 experts fused "
        "numbered_experts padding processed unit_padding vectors",
        "deepseek_v4_tiny": "attributes consumed_experts derivations draft e8m0 experts fused in_place "
        "left_to_hook numbered_experts processed shared_experts sink_padding unit_padding",
        "deepseek_v41_tiny": "attributes consumed_experts derivations e8m0 experts fused in_place left_to_hook "
        "many_scales numbered_experts padding permuted processed shared_experts shared_padding "
        "sink_padding unit_padding",
        "gpt_oss_tiny": "e8m0 experts fused in_place kernel_object padding unit_padding vectors",
        "qwen3_tiny": "attributes fused in_place processed tied",
        "qwen3_moe_tiny": "attributes experts fused in_place numbered_experts padding processed",
        "qwen3_moe_fp8_tiny": "attributes experts fused in_place numbered_experts processed",
        "qwen3_moe_nvfp4_tiny": "attributes derivations experts fused in_place numbered_experts processed",
        "openpangu_tiny": "attributes derivations draft fused sinks vectors",
        "openpangu_vl_tiny": "attributes derivations draft fused sinks vectors wrapper",
        "minicpm_tiny": "fused",
        "minicpm_v_tiny": "fused",
        "medusa_tiny": "draft fused",
        "kimi_k3_dspark_tiny": "attributes buffers consumed_experts context_copies decay derivations draft e8m0 "
        "experts fused left_to_hook numbered_experts padding processed taps unit_padding "
        "vectors",
        "deepseek_v4_dspark_tiny": "attributes consumed_experts derivations draft e8m0 experts fused in_place "
        "left_to_hook numbered_experts processed shared_experts sink_padding taps unit_padding",
        "deepseek_v41_dspark_tiny": "attributes consumed_experts derivations draft e8m0 experts fused in_place "
        "left_to_hook many_scales numbered_experts padding permuted processed shared_experts shared_padding "
        "sink_padding taps unit_padding",
    }.items()
}


@dataclass(frozen=True)
class About:
    """`ABOUT` of a fault module; the first line of its docstring says in one sentence what goes wrong.

    kind: key of KINDS. reports: public reports that it stands for, `repository#number`, or words where no number is
    known. finding: diagnosis that must come first, or CRASH. via: kinds of loads in which it does something.
    needs: features of the model (FEATURES), and of the layout: `tp`, `ep` (more than one rank), `stages` (more than one
    of a pipeline), `redundant_experts`, `rebalanced` (experts that have moved), `adapters` (layers wrapped for some),
    `kernel_layout` (a kernel that consumes the experts), `kernel_state` (one that owns tensors); or a kind of load
    that must go before. where: what it needs besides for one kind of load.

    without: feature -> what is found instead where the model lacks it. after: kind of load, or `sleep2`, a sleep that
    discards the weights -> what is found instead where it comes before; words of several, features among them, must
    all be there.
    """

    kind: str
    reports: tuple[str, ...]
    finding: str
    via: tuple[str, ...] = STARTS + RELOADS
    needs: tuple[str, ...] = ()
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)

    def expected(self, via: Collection[str], features: Collection[str]) -> str:
        """What must be found first where loads go `via` these ways in a model with these features."""
        instead = [found for feature, found in self.without.items() if feature not in features]
        instead += [found for words, found in self.after.items() if {*words.split()} <= {*via, *features}]
        return instead[0] if instead else self.finding

    def why_not(self, via: Collection[str], features: Collection[str]) -> str:
        """Why the fault changes nothing where loads go `via` these ways and these features are there; else ""."""
        ways = [way for way in self.via if way in via]
        if not ways:
            return f"no load goes via {' or '.join(self.via)}"
        there = {*via, *features}
        missing = [need for need in self.needs if need not in there]
        per_way = [[need for need in self.where.get(way, ()) if need not in there] for way in ways]
        missing += min(per_way)
        if not missing:
            return ""
        is_load = missing[0] in STARTS + RELOADS
        return f"no load goes via {missing[0]}" if is_load else f"there is no {missing[0]}"


def features(
    model: str,
    tp: int,
    ep: int,
    moe_kernel: str,
    stages: int = 1,
    redundant: int = 0,
    rebalanced: bool = False,
    adapters: bool = False,
) -> frozenset[str]:
    """What one of these models has on a layout."""
    found = set(FEATURES[model])
    found |= {name for name, ranks in (("tp", tp), ("ep", ep), ("stages", stages)) if ranks > 1}
    found |= {"redundant_experts"} if redundant else set()
    found |= {"rebalanced"} if rebalanced else set()
    found |= {"adapters"} if adapters else set()
    if "consumed_experts" in found and moe_kernel == "mega_moe":
        found.add("kernel_layout")
    if found & {"kernel_layout", "kernel_object"}:
        found.add("kernel_state")
    return frozenset(found)
