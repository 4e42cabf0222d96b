"""Which slices of a checkpoint live tensors hold, found by content: every layout that engines keep weights in."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from collectors.locate import Located, Location, locate, to_part
from collectors.parts import audit_parts
from collectors.row_index import hash_rows
from workloads.loading.weights import Region, narrow

F32, BF16 = torch.float32, torch.bfloat16
Tensors = dict[str, torch.Tensor]


class Checkpoint:
    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def names(self) -> Iterator[str]:
        return iter(self.tensors)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def slice(self, name: str, region: Region) -> torch.Tensor:
        return narrow(self.tensors[name], region)


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % (1 << 31))
    return torch.randn(shape, generator=generator).to(dtype)


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def found(checkpoint: Tensors, live: Tensors, tp: int = 1) -> Location:
    """Located, and checked: every piece equals its slice of the checkpoint, and an audit of them passes."""
    location = locate(list(live.items()), Checkpoint(checkpoint), tp)
    parts = [to_part(one, live[one.tensor]) for one in location.pieces]
    for one, part in zip(location.pieces, parts, strict=True):
        want = narrow(checkpoint[one.source], one.region)
        assert part.value.shape == want.shape
        assert part.value.is_contiguous()
        same = want.view(torch.uint8).view(one.dtype) if want.element_size() == 1 else want.to(one.dtype)
        assert torch.equal(octets(part.value), octets(same))
    records = [
        r for kind, r in audit_parts("target", parts, set(live), Checkpoint(checkpoint), {}) if kind == "part"
    ]
    assert all(record["fp"] == record["expected"] for record in records)
    return location


def covered(checkpoint: Tensors, locations: list[Location]) -> Tensors:
    """Which values some rank holds."""
    masks = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in checkpoint.items()}
    for location in locations:
        for one in location.pieces:
            narrow(masks[one.source], one.region).fill_(True)
    return masks


def check_all(checkpoint: Tensors, ranks: list[Tensors]) -> list[Location]:
    locations = [found(checkpoint, live, len(ranks)) for live in ranks]
    for name, mask in covered(checkpoint, locations).items():
        assert mask.all(), (name, [location.reasons.get(name) for location in locations])
    if len(ranks) == 1:
        assert locations[0].reasons == {}
    return locations


def of(location: Location, source: str) -> list[Located]:
    return [one for one in location.pieces if one.source == source]


def rows(tensor: torch.Tensor, rank: int, tp: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(tp, dim)[rank].contiguous()


TP = pytest.mark.parametrize("tp", [1, 2, 4])


@TP
def test_a_dense_model(tp: int) -> None:
    """Vocabulary with padding, merged and column-split matrices, replicated norms, merged biases, in two layers."""
    checkpoint = {"model.embed_tokens.weight": random(50, 64), "lm_head.weight": random(50, 64, seed=1)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for name, height, width in (
            ("q_proj", 64, 64),
            ("k_proj", 16, 64),
            ("v_proj", 16, 64),
            ("o_proj", 64, 64),
        ):
            checkpoint[f"{layer}self_attn.{name}.weight"] = random(height, width, seed=10 * i + ord(name[0]))
        for name, height in (("q_proj", 64), ("k_proj", 16), ("v_proj", 16)):
            checkpoint[f"{layer}self_attn.{name}.bias"] = random(height, seed=10 * i + ord(name[0]))
        checkpoint[f"{layer}mlp.gate_proj.weight"] = random(96, 64, seed=20 + i)
        checkpoint[f"{layer}mlp.up_proj.weight"] = random(96, 64, seed=30 + i)
        checkpoint[f"{layer}mlp.down_proj.weight"] = random(64, 96, seed=40 + i)
        checkpoint[f"{layer}input_layernorm.weight"] = torch.ones(64)
        checkpoint[f"{layer}post_attention_layernorm.weight"] = torch.ones(64)

    def rank_side(rank: int) -> Tensors:
        pad = torch.zeros(64 - 50, 64)
        live = {
            "target:model.embed_tokens.weight": rows(
                torch.cat([checkpoint["model.embed_tokens.weight"], pad]), rank, tp
            ),
            "target:lm_head.weight": rows(torch.cat([checkpoint["lm_head.weight"], pad]), rank, tp),
        }
        for i in range(2):
            there, here = f"model.layers.{i}.", f"target:model.layers.{i}."
            for kind in ("weight", "bias"):
                live[f"{here}self_attn.qkv_proj.{kind}"] = torch.cat(
                    [rows(checkpoint[f"{there}self_attn.{n}_proj.{kind}"], rank, tp) for n in "qkv"]
                )
            live[f"{here}mlp.gate_up_proj.weight"] = torch.cat(
                [rows(checkpoint[f"{there}mlp.{n}_proj.weight"], rank, tp) for n in ("gate", "up")]
            )
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                live[here + name] = rows(checkpoint[there + name], rank, tp, 1)
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                live[here + name] = checkpoint[there + name].clone()
        return live

    locations = check_all(checkpoint, [rank_side(rank) for rank in range(tp)])
    for location in locations:
        for name in (
            "model.layers.1.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
        ):
            assert [one.tensor for one in of(location, name)] == [f"target:{name}"]
    assert len(locations[0].pieces) == len(checkpoint)  # one region each


@TP
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_stacked(tp: int, transposed: bool) -> None:
    """Gate and up of each expert merged, each split over ranks; the same transposed."""
    names = [f"layers.0.experts.{e}.{w}.weight" for e in range(6) for w in ("w1", "w3", "w2")]
    checkpoint = {
        name: random(32, 48, seed=i) if "w2" not in name else random(48, 32, seed=i)
        for i, name in enumerate(names)
    }
    ranks = []
    for rank in range(tp):
        w13 = torch.stack(
            [
                torch.cat(
                    [rows(checkpoint[f"layers.0.experts.{e}.{w}.weight"], rank, tp) for w in ("w1", "w3")]
                )
                for e in range(6)
            ]
        )
        w2 = torch.stack([rows(checkpoint[f"layers.0.experts.{e}.w2.weight"], rank, tp, 1) for e in range(6)])
        if transposed:
            w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
        ranks.append({"target:layers.0.experts.w13_weight": w13, "target:layers.0.experts.w2_weight": w2})
    locations = check_all(checkpoint, ranks)
    assert all(one.transposed == transposed for one in locations[0].pieces)


@TP
def test_stacked_checkpoints(tp: int) -> None:
    checkpoint = {"experts.gate_up": random(5, 24, 32), "experts.down": random(5, 32, 24)}
    check_all(
        checkpoint,
        [
            {
                "target:w13": rows(checkpoint["experts.gate_up"], rank, tp, 1),
                "target:w2": rows(checkpoint["experts.down"], rank, tp, 2),
            }
            for rank in range(tp)
        ],
    )
    check_all(
        checkpoint,
        [
            {
                "target:w13": checkpoint["experts.gate_up"].transpose(1, 2).contiguous(),
                "target:w2": checkpoint["experts.down"].transpose(1, 2),
            }
        ],
    )


@TP
def test_replicated_heads(tp: int) -> None:
    """Two key heads over up to four ranks."""
    checkpoint = {
        "q.weight": random(32, 64),
        "k.weight": random(16, 64),
        "k.bias": random(16),
        "q.bias": random(32),
    }
    ranks = []
    for rank in range(tp):
        heads = min(tp, 2)
        own = rank * heads // tp
        ranks.append(
            {
                f"target:qk.{kind}": torch.cat(
                    [rows(checkpoint[f"q.{kind}"], rank, tp), rows(checkpoint[f"k.{kind}"], own, heads)]
                )
                for kind in ("weight", "bias")
            }
        )
    check_all(checkpoint, ranks)


@TP
def test_permuted_runs(tp: int) -> None:
    """Groups of heads hold rows of q, k, v and z in turn; the engine keeps all q, then all k, and so on."""
    source = random(8 * 24, 64)
    groups = source.view(8, 24, 64)
    ranks = []
    for rank in range(tp):
        own = groups[rank * 8 // tp : (rank + 1) * 8 // tp]
        ranks.append({"target:in_proj": torch.cat([p.flatten(0, 1) for p in own.split([4, 4, 8, 8], 1)])})
    locations = check_all({"in_proj_qkvz": source}, ranks)
    assert len(locations[0].pieces) == 4 * 8 // tp


@pytest.mark.parametrize(("stored", "live"), [(F32, BF16), (BF16, F32), (torch.float16, F32), (BF16, BF16)])
@TP
def test_casts(stored: torch.dtype, live: torch.dtype, tp: int) -> None:
    checkpoint = {
        "w": random(32, 64, dtype=stored),
        "o": random(32, 32, dtype=stored),
        "b": random(32, dtype=stored),
    }
    check_all(
        checkpoint,
        [
            {
                "target:w": rows(checkpoint["w"], rank, tp).to(live),
                "target:o": rows(checkpoint["o"], rank, tp, 1).to(live),
                "target:b": rows(checkpoint["b"], rank, tp).to(live),
            }
            for rank in range(tp)
        ],
    )


def test_bytes_under_another_name() -> None:
    scales = torch.randint(0, 256, (32, 48), dtype=torch.uint8)
    codes = torch.randint(0, 256, (16, 48), dtype=torch.uint8).view(torch.float8_e4m3fn)
    check_all(
        {"s": scales, "c": codes},
        [{"target:s": scales.view(torch.float8_e8m0fnu), "target:c": codes.clone()}],
    )


@TP
def test_dimensions_of_one(tp: int) -> None:
    checkpoint = {
        "conv.weight": random(32, 1, 4),
        "A_log": random(8),
        "gate": random(1, 40),
        "patch": random(16, 3, 4, 4),
        "scalar": torch.tensor(3.25),
        "few": random(4, 24),
    }
    check_all(
        checkpoint,
        [
            {
                "target:conv": rows(checkpoint["conv.weight"].squeeze(1), rank, tp),
                "target:A": rows(checkpoint["A_log"], rank, tp)[None, :, None],
                "target:gate": checkpoint["gate"].reshape(-1),
                "target:patch": checkpoint["patch"].reshape(16, 48),
                "target:scalar": torch.tensor([3.25]),
                "target:few": rows(checkpoint["few"], rank, tp),
            }
            for rank in range(tp)
        ],
    )


def test_uneven_shards_of_a_vocabulary() -> None:
    """Four ranks of 64 rows: the last has padding alone."""
    table = random(150, 32)
    padded = torch.cat([table, torch.zeros(106, 32)])
    locations = check_all({"embed": table}, [{"target:embed": rows(padded, rank, 4)} for rank in range(4)])
    assert of(locations[2], "embed")[0].region == ((128, 22), (0, 32))
    assert "None of its 150 rows" in locations[3].reasons["embed"]
    assert "not found are rows 64-149" in locations[0].reasons["embed"]


def test_every_holder_of_a_copy_is_reported() -> None:
    w = random(32, 64)
    location = found(
        {"w": w}, {"target:w": w.clone(), "target:packed": torch.cat([random(8, 64, seed=4), w])}
    )
    assert {(one.tensor, one.target[0]) for one in location.pieces} == {
        ("target:packed", (8, 32)),
        ("target:w", (0, 32)),
    }


def test_tied_weights_go_by_name() -> None:
    w = random(32, 64)
    tied = {"model.embed_tokens.weight": w, "lm_head.weight": w.clone()}
    one = check_all(tied, [{"target:model.embed_tokens.weight": w}])[0]
    assert len(one.pieces) == 2
    two = check_all(
        tied, [{"target:lm_head.weight": w.clone(), "target:model.embed_tokens.weight": w.clone()}]
    )[0]
    assert {p.source: p.tensor for p in two.pieces} == {name: f"target:{name}" for name in tied}


def test_constants_go_by_name_and_neighbours() -> None:
    checkpoint: Tensors = {}
    live: Tensors = {}
    for i in range(12):
        for name in ("a.weight", "b.weight"):
            checkpoint[f"layers.{i}.{name}"] = torch.zeros(8, 16)
            live[f"target:layers.{i}.{name}"] = torch.zeros(8, 16)
        checkpoint[f"layers.{i}.norm.weight"] = torch.ones(16)
        live[f"target:layers.{i}.norm.weight"] = torch.ones(16)
        holed = random(8, 16, seed=i)
        holed[2:4] = 0
        holed[7] = 0
        checkpoint[f"layers.{i}.holed"] = holed
        live[f"target:layers.{i}.holed"] = holed.clone()
    location = check_all(checkpoint, [live])[0]
    assert all(one.tensor == f"target:{one.source}" for one in location.pieces)
    assert len(location.pieces) == len(checkpoint)


def test_equal_biases_lie_where_their_weights_do() -> None:
    """In alphabetical order k comes before q; only the weights tell where each bias belongs."""
    checkpoint = {
        f"attn.{n}_proj.{kind}": random(h, 64, seed=ord(n)) if kind == "weight" else torch.zeros(h)
        for n, h in (("k", 16), ("q", 32), ("v", 16))
        for kind in ("bias", "weight")
    }
    live = {
        f"target:attn.qkv_proj.{kind}": torch.cat([checkpoint[f"attn.{n}_proj.{kind}"] for n in "qkv"])
        for kind in ("weight", "bias")
    }
    location = check_all(checkpoint, [live])[0]
    assert {n: of(location, f"attn.{n}_proj.bias")[0].target for n in "qkv"} == {
        "q": ((0, 32),),
        "k": ((32, 16),),
        "v": ((48, 16),),
    }


@pytest.mark.parametrize("live_dtype", [F32, BF16])
def test_a_bias_of_sections_is_cut_as_the_rows_of_its_weight(live_dtype: torch.dtype) -> None:
    """A convolution over x, B and C side by side, each split over ranks by itself."""
    sizes, tp = (64, 16, 16), 2
    checkpoint = {"conv1d.weight": random(96, 1, 4), "conv1d.bias": random(96)}

    def share(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat([section.chunk(tp)[rank] for section in tensor.split(sizes)]).to(live_dtype)

    ranks = [{f"target:{name}": share(t, rank) for name, t in checkpoint.items()} for rank in range(tp)]
    locations = check_all(checkpoint, ranks)
    regions = sorted(one.region for one in of(locations[1], "conv1d.bias"))
    assert regions == [((32, 32),), ((72, 8),), ((88, 8),)]
    assert locations[0].reasons["conv1d.bias"].startswith("50 % of it was found")
    ranks[1]["target:conv1d.bias"][40:] += 1  # of the last section
    lost = covered(checkpoint, [found(checkpoint, live, tp) for live in ranks])["conv1d.bias"]
    assert lost.logical_not().nonzero().flatten().tolist() == list(range(88, 96))


def test_strided_live_tensors() -> None:
    w, v = random(32, 64), random(64, 32, seed=3)
    check_all(
        {"w": w, "v": v}, [{"target:w": w.t().contiguous().t(), "target:v": torch.cat([v, v], 1)[:, :32]}]
    )


# What is wrong is not found --------------------------------------------------------------------------


def swap(t: torch.Tensor) -> torch.Tensor:
    t[[3, 9]] = t[[9, 3]]
    return t


def swap_inside(t: torch.Tensor) -> torch.Tensor:
    t[5, [0, 7]] = t[5, [7, 0]]
    return t


HARM: list[tuple[Callable[[torch.Tensor], torch.Tensor], str | None, int]] = [
    (swap, None, 5),  # found, but as runs that show the swap
    (swap_inside, "96.88 % of it was found in live tensors of this rank; not found are rows 5.", 2),
    (torch.zero_, "None of its 32 rows is in a live tensor of this rank", 0),
    (
        lambda t: t[16:].clone(),
        "50 % of it was found in live tensors of this rank; not found are rows 0-15.",
        1,
    ),
    (lambda t: t.index_fill_(0, torch.tensor([1, 3, 5, 7, 9]), 0), "not found are rows 1, 3, 5, 7, ...", 6),
    (lambda t: t.view(-1)[:1].fill_(9) and t, "not found are rows 0.", 1),
]


@pytest.mark.parametrize(("harm", "reason", "pieces"), HARM)
def test_harm_is_found_in_part(
    harm: Callable[[torch.Tensor], torch.Tensor], reason: str | None, pieces: int
) -> None:
    checkpoint = {"w": random(32, 64), "other": random(32, 64, seed=8)}
    live = {"target:w": harm(checkpoint["w"].clone()), "target:other": checkpoint["other"]}
    location = found(checkpoint, live)
    assert len(of(location, "w")) == pieces
    assert "other" not in location.reasons
    assert (reason is None) == ("w" not in location.reasons)
    assert reason is None or reason in location.reasons["w"]


def test_the_wrong_column_shard_is_found_as_what_it_is() -> None:
    checkpoint = {"w": random(32, 64)}
    location = found(checkpoint, {"target:w": checkpoint["w"][:, 32:].contiguous()}, 2)
    assert location.pieces[0].region == ((0, 32), (32, 32))
    assert location.reasons["w"] == "50 % of it was found in live tensors of this rank."


def test_tensors_without_bytes_are_left_out() -> None:
    released = torch.zeros(8, 8)
    released.untyped_storage().resize_(0)
    w = random(4, 4)
    live = {
        "target:gone": released,
        "target:meta": torch.empty(4, 4, device="meta"),
        "target:no": torch.empty(0, 4),
    }
    assert found({"w": w}, live | {"target:w": w}).reasons == {}
    assert locate([], Checkpoint({"w": w, "b": random(3), "e": torch.empty(0, 3)}), 2).pieces == []


# The hash --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 8, 15, 16, 17, 64, 577, 4096, 4097, 6144, 12_300])
def test_equal_hashes_mean_equal_rows(width: int) -> None:
    generator = np.random.default_rng(width)
    count = min(20_000, (4 << 20) // width)
    rows_ = generator.integers(0, 2, (count, width), dtype=np.uint8) * np.uint8(
        128
    )  # bits that cancel most easily
    hashes = hash_rows(torch.from_numpy(rows_), torch.uint8)
    whole = np.stack([hashes.first, hashes.second], 1)
    assert len(np.unique(whole, axis=0)) == len(np.unique(rows_, axis=0))


def test_a_million_rows_of_few_bytes() -> None:
    rows_ = torch.randint(
        0, 3, (1_000_000, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    distinct = len(np.unique(rows_.numpy().view("V24")))
    hashes = hash_rows(rows_, torch.uint8)
    for half in (hashes.first, hashes.second):
        assert len(np.unique(half)) == distinct


def test_a_swap_within_a_row_is_seen() -> None:
    base = random(1, 3000)
    rows_ = base.repeat(2000, 1)
    generator = np.random.default_rng(0)
    for i in range(1, 2000):
        a, b = generator.choice(3000, 2, replace=False)
        rows_[i, [a, b]] = rows_[i, [b, a]]
    signs = torch.ones(500, 64)
    for i in range(500):
        signs[i, generator.choice(64, 7, replace=False)] = -1
    for some in (rows_, signs):
        hashes = hash_rows(some, F32)
        assert len(np.unique(hashes.first)) == len(np.unique(some.numpy(), axis=0))


def test_rows_do_not_depend_on_their_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random(70, 96)
    want = hash_rows(w, F32, 3)
    pieces = hash_rows(w.view(210, 32), F32)
    strided = hash_rows(w.t().contiguous().t(), F32, 3)
    monkeypatch.setattr("collectors.row_index._AT_ONCE", 1)
    for other in (pieces, strided, hash_rows(w, F32, 3)):
        assert np.array_equal(want.first, other.first)
        assert np.array_equal(want.second, other.second)
