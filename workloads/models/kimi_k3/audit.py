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
    Rule("*.conv1d.decode_conv1d_weight", "derived", "tap-major copy of conv1d.weight that KDA decode reads"),
    Rule("*.o_norm.decode_norm_weight", "derived", "FP32 copy of o_norm.weight that KDA decode reads"),
    Rule("*.kv_b_proj.W_UK_T", "derived", "key half of kv_b_proj.weight per head, absorbed into MLA decode"),
    Rule("*.kv_b_proj.W_UV", "derived", "value half of kv_b_proj.weight per head, absorbed into MLA decode"),
    Rule(
        "*.experts.slot*", "constant", "which slots hold each routed expert, decided by load balancing alone"
    ),
    Rule(
        "*.context_kv_proj",
        "derived",
        "latent projections of all layers of the drafter, joined: the target's states go through them at once",
    ),
    Rule(
        "*._context_kv_norm_weights", "derived", "norms of the latents of all layers of the drafter, joined"
    ),
    Rule(
        "*.inv_freq",
        "constant",
        "angles by which the drafter turns queries and keys, from the dimensions alone",
    ),
    Rule(
        "global:workloads.kernels.quantization.*",
        "constant",
        "values of the E2M1, E4M3 and E8M0 codes, the same in every process",
    ),
    Rule(
        "*:caches.*", "runtime", "latents, convolution inputs and recurrent states of the requests in flight"
    ),
)
