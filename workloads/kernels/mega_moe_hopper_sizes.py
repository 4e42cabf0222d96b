"""Sizes of MegaMoE on Hopper: what its calls and its layout take. Standard library only, so that a plan knows them."""

FOLDS = 26  # octaves below the row's largest exponent that the kernel tells apart
TILE = 128  # rows and columns of a tile of weights
SCALE_BYTES = 512  # of the scales of 128 rows and 128 columns
WEIGHT_BYTES = 8192  # of their packed weights
SMALL_TILE, LARGE_TILE = 32, 224  # tokens of an expert that one task takes
SMALL_ROWS = 20  # tokens of an expert, on average, up to which the small tile is the faster one
ALIGNMENT = 1024  # of the parts of the workspace
PACK_BYTES = 18  # for each weight of one expert's matrix, while it is brought into the layout


def scale_bytes(columns: int) -> int:
    """Of 128 rows: differences of exponents, and one exponent a row."""
    return columns // TILE * SCALE_BYTES + TILE


def layer_bytes(experts: int, hidden: int, inner: int) -> int:
    """Of the experts of one layer in the kernel's layout."""
    weights = 3 * hidden * inner // TILE**2 * WEIGHT_BYTES
    scales = 2 * inner // TILE * scale_bytes(hidden) + hidden // TILE * scale_bytes(inner)
    return experts * (weights + scales)


def tasks(pairs: int, experts: int) -> tuple[int, int]:
    """(tokens of a tile, most tiles) for `pairs` of tokens and slots."""
    largest = SMALL_TILE if pairs <= SMALL_ROWS * experts else LARGE_TILE
    return largest, min(experts, pairs) + pairs // largest


def workspace(pairs: int, experts: int, hidden: int, inner: int, combine: bool) -> tuple[dict[str, int], int]:
    """Where each part of the memory between the launches begins, and how large it is; in bytes.

    combine: the rows of all pairs lie in it, to be summed.
    """
    rows = pairs + 7 * min(experts, pairs)  # an expert's last tile is filled up to a multiple of 8
    _, tiles = tasks(pairs, experts)
    sizes = {
        "xq": rows * hidden,
        "hq": rows * inner,
        "xs": rows * (hidden // 128) * 4,
        "hs": rows * (inner // 64) * 4,
        "place": pairs * 4,
        "row_pair": rows * 4,
        "row_weight": rows * 4,
        "tiles": tiles * 12,
        "done": tiles * 4,
        "state": 8,
        "out": pairs * hidden * 2 if combine else 0,
    }
    starts, end = {}, 0
    for name, size in sizes.items():
        starts[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end + ALIGNMENT
