"""Every checkpoint tensor of a gpt-oss stack, in each of the layouts that its checkpoints come in.

Imports no torch. Names, shapes and dtypes of the `combined` layout are those of the published checkpoint, which this
table reproduces to the byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from workloads.loading.tensor_table import (
    COLUMN,
    MXFP4_GROUP,
    ROW,
    VOCAB,
    Quantized,
    Row,
    Section,
    Shard,
    specs,
)
from workloads.models.gpt_oss.config import GptOssConfig

NOT_LOADED: tuple[str, ...] = ()
PIECES = ("weight", "scale", "bias")  # of an expert's matrix


@dataclass(frozen=True)
class Naming:
    """How one layout names the pieces of the experts' matrices.

    stem: of a matrix below its layer's experts, with `*` where an expert has a tensor of its own. suffixes: of PIECES.
    format: of the quantised pieces.
    """

    stem: str
    suffixes: tuple[str, str, str]
    format: str

    def name(self, matrix: str, piece: str, expert: int | str = "*") -> str:
        """Name below `experts.` of a piece of `gate_up_proj` or `down_proj`."""
        return self.stem.format(expert=expert, matrix=matrix) + self.suffixes[PIECES.index(piece)]


NAMING = {
    "combined": Naming("{matrix}", ("_blocks", "_scales", "_bias"), "mxfp4_blocks"),
    "per_expert": Naming("{expert}.{matrix}.", ("weight_packed", "weight_scale", "bias"), "mxfp4"),
    "quark": Naming("{expert}.{matrix}.", ("weight", "weight_scale", "bias"), "mxfp4"),
}


def sections(c: GptOssConfig) -> Iterator[Section]:
    """The whole checkpoint, layer by layer.

    Raises ValueError when a width of the experts is not a whole number of scale groups, or the layout is unknown.
    """
    hidden, vocab = (c.hidden_size,), (c.vocab_size, c.hidden_size)
    yield Section(specs("model.", "embedding", [Row("embed_tokens.weight", vocab, VOCAB)]), [])
    for layer in range(c.num_layers):
        yield _decoder_layer(c, layer)
    tail = specs("model.", "norms", [Row("norm.weight", hidden)])
    yield Section(tail + specs("", "head", [Row("lm_head.weight", vocab, VOCAB)]), [])


def _decoder_layer(c: GptOssConfig, layer: int) -> Section:
    prefix = f"model.layers.{layer}."
    norms = [
        Row(f"{name}.weight", (c.hidden_size,)) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    router = [
        Row("mlp.router.weight", (c.num_experts, c.hidden_size)),
        Row("mlp.router.bias", (c.num_experts,)),
    ]
    plain = specs(prefix, "norms", norms)
    plain += specs(prefix, "attention", _attention(c))
    plain += specs(prefix, "router", router)
    if c.checkpoint_layout == "combined":
        return Section(plain + specs(prefix, "routed_experts", _experts(c, (c.num_experts,))), [])
    return Section(plain, specs(prefix, "routed_experts", _experts(c, ())), c.num_experts)


def _attention(c: GptOssConfig) -> list[Row]:
    h, heads, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = [Row("self_attn.sinks", (c.num_heads,), COLUMN)]
    for name, width in (("q", heads), ("k", keys), ("v", keys)):
        rows.append(Row(f"self_attn.{name}_proj.weight", (width, h), COLUMN))
        rows.append(Row(f"self_attn.{name}_proj.bias", (width,), COLUMN))
    return [*rows, Row("self_attn.o_proj.weight", (h, heads), ROW), Row("self_attn.o_proj.bias", (h,))]


def _experts(c: GptOssConfig, stack: tuple[int, ...]) -> list[Row]:
    """Both matrices: rows of gate and up alternate in `gate_up_proj`. stack: leading dimension of a tensor that holds
    all experts, else none. Without expert parallelism each expert's intermediate size is divided over the TP group."""
    naming, first = NAMING[c.checkpoint_layout], len(stack)
    rows = []
    for matrix, (out, width), split in (
        ("gate_up_proj", (2 * c.intermediate_size, c.hidden_size), 0),
        ("down_proj", (c.hidden_size, c.intermediate_size), 1),
    ):
        if width % MXFP4_GROUP:
            raise ValueError(
                f"Expert matrix {matrix} has {width} input columns, which is not a multiple of the {MXFP4_GROUP} that "
                "share an MXFP4 scale: change hidden_size or intermediate_size."
            )
        groups, stem = width // MXFP4_GROUP, "mlp.experts." + naming.stem.format(expert="*", matrix=matrix)
        weight, scale = (
            Quantized(naming.format, piece, stem, (*stack, out, width)) for piece in ("weight", "scale")
        )
        packed = (groups, MXFP4_GROUP // 2) if stack else (width // 2,)
        names = ["mlp.experts." + naming.name(matrix, piece) for piece in PIECES]
        shard = Shard("expert", 0, tensor_dim=first + split)
        bias = Shard("expert", 0, tensor_dim=None if split else first)
        rows += [
            Row(names[0], (*stack, out, *packed), shard, "U8", quantized=weight),
            Row(names[1], (*stack, out, groups), shard, "U8", quantized=scale),
            Row(names[2], (*stack, out), bias),
        ]
    return rows
