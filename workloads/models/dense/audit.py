"""What the tensors beside the parameters of an ordinary decoder are for."""

from workloads.loading.weights import Rule

RULES = (
    Rule(
        "*rotary_emb.inv_freq", "constant", "angle per position of each pair of channels, from the dimensions"
    ),
    Rule(
        "global:workloads.kernels.quantization.*",
        "constant",
        "values of the E2M1, E4M3 and E8M0 codes, the same in every process",
    ),
    Rule("*:caches.*", "runtime", "keys and values of the requests in flight"),
)
