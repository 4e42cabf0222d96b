"""What each tensor beside the parameters is for, so that an audit can judge it by its class."""

from workloads.loading.weights import Rule

RULES = (
    Rule(
        "*.experts._transformed_l1_weights*",
        "weight",
        "gate and up projections of the routed experts and their scales, in the MoE kernel's layout; the parameters "
        "they were loaded into are gone",
    ),
    Rule(
        "*.experts._transformed_l2_weights*",
        "weight",
        "down projections of the routed experts (the loaded storage itself) and their scales in the MoE kernel's "
        "layout",
    ),
    Rule(
        "*.shared_experts._shared_l1_weights*",
        "derived",
        "gate and up projections of the shared experts and their scales by row, in the MoE kernel's layout",
    ),
    Rule(
        "*.shared_experts._shared_l2_weights*",
        "derived",
        "down projections of the shared experts (the loaded storage itself) and their scales by row, in the MoE "
        "kernel's layout",
    ),
    Rule(
        "*.weight_scale",
        "weight",
        "UE8M0 scales of an FP8 matrix by row, packed and MN-major as the FP8 kernel reads them; the parameter they "
        "were loaded into is gone",
    ),
    Rule(
        "*.hc_attn_fn_broadcast",
        "derived",
        "mixing projection of the first layer summed over the copies, which are equal there",
    ),
    Rule("*.cos_sin_cache", "constant", "cosines and sines of every position, from the dimensions alone"),
    Rule(
        "*.experts.slot*", "constant", "which slots hold each routed expert, decided by load balancing alone"
    ),
    Rule(
        "global:workloads.kernels.quantization.*",
        "constant",
        "values of the E2M1, E4M3 and E8M0 codes, the same in every process",
    ),
    Rule("*:caches.*", "runtime", "keys, compressed groups and unfinished groups of the requests in flight"),
)
