"""What a family of models tells the planner, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """`kind`: weights | padding | derived | buffer | peak | cache | reserve. `basis`: what the bytes follow from."""

    name: str
    kind: str
    nbytes: int
    basis: str = ""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model. keys: of the model's dimensions, by field.

    count: in a layer. per_token: chosen for a token. layers: that have experts. hidden, intermediate: width of the
    expert's input and between its two matrices. quantization: of the weights: mxfp4 | nvfp4 | fp8 | bf16.
    """

    count: int
    per_token: int
    layers: int
    hidden: int
    intermediate: int
    quantization: str
    keys: dict[str, str]


@dataclass(frozen=True)
class Load:
    """What serving makes room for on one data-parallel rank: requests, and tokens of all of them together."""

    requests: int
    tokens: int
