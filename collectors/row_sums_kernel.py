"""Triton kernel: sums of rows (`collectors.row_sums`) wherever a table says that rows lie, and what their bytes show.

Importing this module needs triton; `collectors.device_sums` does so when the first tensor of a GPU is fingerprinted.
"""

import triton
import triton.language as tl

# Of 16 bytes in four registers, $4 to $7: sets the byte at $88, unless it is set, if a NaN shows in them. $8, $24, $40,
# $56, $72: the words of `collectors.byte_flags.NAN_WORDS`, each 16 times, as the address. Triton's own operations would
# take every byte into a register of its own.
_TEST = """
    xor.b32 word, {word}, $8;
    and.b32 hit, word, $24;
    add.u32 hit, hit, $40;
    or.b32  word, word, $56;
    and.b32 hit, hit, word;
    or.b32  any, any, hit;
"""
_MARK_NAN = tl.constexpr(
    "{ .reg .pred found; .reg .b32 word, hit, any; mov.b32 any, 0;"
    + "".join(_TEST.replace("{word}", f"${word}") for word in range(4, 8))
    + "and.b32 any, any, $72; setp.ne.b32 found, any, 0; mov.b32 word, 1;"
    + "@found ld.global.u8 word, [$88]; setp.eq.b32 found, word, 0; @found st.global.u8 [$88], 1;"
    + "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
_MARK_NAN_REGISTERS = tl.constexpr("=r,=r,=r,=r" + 84 * ",r" + 16 * ",l")


@triton.jit(do_not_specialize=["segments"])
def row_sums_kernel(
    table,  # int64 [5, segments]: first row / ALIGN, leaf's first byte, bytes / ALIGN, sums / 64, leaf; from `keys` on
    segments,  # a multiple of BLOCK // ROWS
    kinds,  # int32 [tiles]: kind of NaN that the values of a tile may be
    nan_words,  # int32 [kinds, 5]
    keys,  # int8 [16, 4096]
    factors,  # int64 [64, 16]: of the sums
    constants,  # int32 [4097, 16]: sums of a row whose first i bytes are 1
    flags,  # uint8 [leaves, 3]: NaN, not constant, first byte
    ROWS: tl.constexpr,  # of a segment
    ALIGN: tl.constexpr,  # divides addresses and bytes
    FOLD: tl.constexpr,  # a segment has 64 rows, whose sums are added up
    FLAGS: tl.constexpr,
    PACKED: tl.constexpr,  # inline assembly may be used; it needs 16 bytes of a row in one thread
    BLOCK: tl.constexpr,  # rows of a tile
    STEP: tl.constexpr,  # bytes of every row read at a time
    STAGES: tl.constexpr,
):
    """Sums int32 [16] of the rows of BLOCK // ROWS segments, or of each segment int64 [16]: their sum times `factors`.

    A row has up to 4096 bytes, and zeros behind them.
    Units of ALIGN show the compiler that addresses and lengths are multiples of it.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, 16)
    segment = table + tile * (BLOCK // ROWS) + row // ROWS
    before = (row % ROWS).to(tl.int64) * (4096 // ALIGN)
    address = (tl.load(segment) + before) * ALIGN
    units = tl.load(segment + 2 * segments) - before
    nbytes = tl.minimum(tl.maximum(units, 0), 4096 // ALIGN).to(tl.int32) * ALIGN
    data = keys + address
    sums = tl.zeros([BLOCK, 16], tl.int32)
    if FLAGS:
        words = nan_words + tl.load(kinds + tile) * 5
        flip = tl.load(words)
        magnitude = tl.load(words + 1)
        carry = tl.load(words + 2)
        either = tl.load(words + 3)
        top = tl.load(words + 4)
        leaf = flags + tl.load(segment + 4 * segments) * 3
    for start in tl.range(0, 4096, STEP, num_stages=STAGES):
        place = start + tl.arange(0, STEP)
        octets = tl.load(data[:, None] + place[None, :], mask=place[None, :] < nbytes[:, None], other=0)
        key = tl.load(keys + place[:, None] + column[None, :] * 4096)
        sums = tl.dot(octets, key, sums, out_dtype=tl.int32)
        if FLAGS:
            if PACKED:
                tl.inline_asm_elementwise(
                    _MARK_NAN,
                    _MARK_NAN_REGISTERS,
                    [octets, flip, magnitude, carry, either, top, leaf[:, None]],
                    dtype=tl.int8,
                    is_pure=False,
                    pack=16,
                )
            else:
                # The same of words put together from bytes, wherever those are.
                shift = tl.arange(0, 4)[None, None, :] * 8
                quads = (tl.reshape(octets, [BLOCK, STEP // 4, 4]).to(tl.int32) & 0xFF) << shift
                word = tl.sum(quads, axis=2) ^ flip
                hit = ((word & magnitude) + carry) & (word | either) & top
                tl.store(leaf, 1, mask=tl.max((hit != 0).to(tl.int32), axis=1) != 0)
    exists = nbytes > 0
    if FOLD:
        factor = tl.load(factors + (row % 64)[:, None] * 16 + column[None, :])
        folded = tl.sum(tl.reshape(sums.to(tl.int64) * factor, [BLOCK // 64, 64, 16]), axis=1)
        whole = table + tile * (BLOCK // 64) + tl.arange(0, BLOCK // 64)
        target = (keys + tl.load(whole + 3 * segments) * 64).to(tl.pointer_type(tl.int64))
        tl.store(target[:, None] + column[None, :], folded, mask=(tl.load(whole + 2 * segments) > 0)[:, None])
    else:
        target = (keys + (tl.load(segment + 3 * segments) + row % ROWS) * 64).to(tl.pointer_type(tl.int32))
        tl.store(target[:, None] + column[None, :], sums, mask=exists[:, None])
    if FLAGS:
        octet = tl.load(keys + tl.load(segment + segments), mask=exists, other=0)
        repeated = tl.load(constants + nbytes[:, None] * 16 + column[None, :])
        varied = tl.max((sums != repeated * octet.to(tl.int32)[:, None]).to(tl.int32), axis=1)
        tl.store(leaf + 1, 1, mask=exists & (varied != 0))
        tl.store(leaf + 2, octet, mask=exists)
