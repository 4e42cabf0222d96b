// Routed experts with MXFP4 weights on Hopper: layouts and numerics are those of mega_moe_hopper.py.
//
// Four launches: `route` sorts (token, slot) pairs by expert, `pack` quantises tokens into the tiles of their experts,
// `experts` computes both matrices in one persistent launch, `combine` sums the slots of each token.
//
// In `experts` every task is a tile of 128 weight rows for one tile of tokens. One warp streams weights, one streams
// tokens, both with bulk copies into rings of their own, and two warpgroups decode their 64 rows into registers and
// multiply. The second matrix's tasks follow the first's in the same order for every block, and only their tokens wait
// for the tile that they read, so that weights stream without a gap.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "mega_moe_wgmma.cuh"  // written by mega_moe_build.py: wgmma<N>

struct Tile {
    int expert, row, rows;  // first padded row, rows (a multiple of 8)
};

struct Shape {
    int tokens, slots, experts, hidden, inner, max_tile, max_tiles;
};

struct Activation {
    int kind;  // 0: SiTU with beta, linear; 1: SwiGLU with limit
    float beta, linear, limit;
};

struct Buffers {
    const uint8_t *w13, *s13, *w2, *s2;
    const int64_t* topk_idx;
    const float* topk_weights;
    const void* x;         // bf16 [T, H], or e4m3 [T, H] with x_scale
    const float* x_scale;  // [T, H/128] or null
    uint8_t *xq, *hq;
    float *xs, *hs;
    int* place;            // [T * K], -1: no expert of this rank
    int* row_pair;         // by padded row, -1: padding
    float* row_weight;
    Tile* tiles;
    int *done, *state;     // tasks finished by tile; state: number of tiles, ids out of range
    __nv_bfloat16* out;    // [T * K, H]
    __nv_bfloat16* y;      // [T, H]
};

namespace {

constexpr int kTile = 128;               // weight rows of a task, and columns of a stage
constexpr int kWeightBytes = 8192;       // of a stage: 128 x 128 values of 4 bits
constexpr int kScaleBytes = 512;         // of a stage: one exponent for each row and 32 columns
constexpr int kConsumers = 256;
constexpr int kThreads = 384;
constexpr int kRankBits = 9;             // a pair's place: tile << 9 | row in the tile
constexpr int kFolds = 26;               // exponents below the row's largest that E5M2 can still hold
constexpr int kCachedTiles = 128;
constexpr int kPitch = 80;               // bytes between tokens where the activation is staged: no bank conflicts

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar) : "memory");
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// Place of a ring and the parity of its current round.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// What one variant of `experts` is made of. kSpan: steps of 128 columns that one stage of a ring holds.
template <int kTokens_, int kSpan_, int kWeightStages_, int kTokenStages_, int kBlocks_, int kRegisters_, int kSpare_>
struct Variant {
    static constexpr int kTokens = kTokens_, kSpan = kSpan_, kWeightStages = kWeightStages_;
    static constexpr int kTokenStages = kTokenStages_, kBlocks = kBlocks_, kRegisters = kRegisters_, kSpare = kSpare_;
};

template <typename V>
struct Shared {
    static constexpr int kTokens = V::kTokens, kWeightStages = V::kWeightStages, kTokenStages = V::kTokenStages;
    alignas(1024) uint8_t tokens[kTokenStages][V::kSpan * kTokens * kTile];
    alignas(128) uint8_t weights[kWeightStages][V::kSpan * kWeightBytes];
    alignas(128) uint8_t scales[kWeightStages][V::kSpan * kScaleBytes];
    alignas(16) float token_scales[kTokenStages][V::kSpan * 2 * kTokens];
    Tile tiles[kCachedTiles];
    alignas(16) uint8_t staged[kTokens * kPitch];
    uint32_t largest[2][kTokens];
    alignas(16) int of_rows[2][kTokens];  // routing weights, or pairs
    uint64_t weights_full[kWeightStages], weights_empty[kWeightStages];
    uint64_t tokens_full[kTokenStages], tokens_empty[kTokenStages];
};

// One matrix of a task: where its weights lie and how many stages it has.
struct Task {
    bool first;
    int matrix_tile, tile;
};

__device__ __forceinline__ Task task_at(int index, int tiles, int first_tiles, int second_tiles) {
    const int firsts = tiles * first_tiles;
    if (index < firsts) return {true, index % first_tiles, index / first_tiles};
    index -= firsts;
    return {false, index % second_tiles, index / second_tiles};
}

template <typename S>
__device__ __forceinline__ Tile tile_at(const S& smem, const Buffers& b, int index) {
    return index < kCachedTiles ? smem.tiles[index] : b.tiles[index];
}

template <typename V>
__device__ void stream_weights(Shared<V>& smem, const Buffers& b, const Shape& shape, int tiles) {
    const int first_tiles = 2 * shape.inner / kTile, second_tiles = shape.hidden / kTile;
    const int tasks = tiles * (first_tiles + second_tiles);
    Ring ring;
    for (int index = blockIdx.x; index < tasks; index += gridDim.x) {
        const Task task = task_at(index, tiles, first_tiles, second_tiles);
        const int steps = (task.first ? shape.hidden : shape.inner) / kTile;
        const int64_t block = static_cast<int64_t>(tile_at(smem, b, task.tile).expert) * (task.first ? first_tiles : second_tiles) +
                              task.matrix_tile;
        const uint8_t* weights = (task.first ? b.w13 : b.w2) + block * steps * kWeightBytes;
        const uint8_t* scales = (task.first ? b.s13 : b.s2) + block * (steps * kScaleBytes + kTile);
        for (int step = 0; step < steps; step += V::kSpan) {
            const int span = min(V::kSpan, steps - step);
            const uint32_t full = shared_address(&smem.weights_full[ring.stage]);
            barrier_wait(shared_address(&smem.weights_empty[ring.stage]), ring.parity ^ 1);
            barrier_expect(full, span * (kWeightBytes + kScaleBytes));
            bulk_copy(shared_address(smem.weights[ring.stage]), weights + step * kWeightBytes, span * kWeightBytes, full);
            bulk_copy(shared_address(smem.scales[ring.stage]), scales + step * kScaleBytes, span * kScaleBytes, full);
            ring.next(V::kWeightStages);
        }
    }
}

template <typename V>
__device__ void stream_tokens(Shared<V>& smem, const Buffers& b, const Shape& shape, int tiles) {
    const int first_tiles = 2 * shape.inner / kTile, second_tiles = shape.hidden / kTile;
    const int tasks = tiles * (first_tiles + second_tiles);
    Ring ring;
    for (int index = blockIdx.x; index < tasks; index += gridDim.x) {
        const Task task = task_at(index, tiles, first_tiles, second_tiles);
        const Tile tile = tile_at(smem, b, task.tile);
        const int columns = task.first ? shape.hidden : shape.inner, steps = columns / kTile;
        const uint32_t groups = task.first ? 1 : 2, bytes = tile.rows * kTile, scale_bytes = groups * tile.rows * 4;
        const uint8_t* values = (task.first ? b.xq : b.hq) + static_cast<int64_t>(tile.row) * columns;
        const float* scales = (task.first ? b.xs : b.hs) + static_cast<int64_t>(tile.row) * (steps * groups);
        if (!task.first) {
            int finished;
            do {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(finished) : "l"(b.done + task.tile) : "memory");
            } while (finished < first_tiles);
            asm volatile("fence.proxy.async;" ::: "memory");  // what others stored becomes visible to bulk copies
        }
        for (int step = 0; step < steps; step += V::kSpan) {
            const uint32_t span = min(V::kSpan, steps - step);
            const uint32_t full = shared_address(&smem.tokens_full[ring.stage]);
            barrier_wait(shared_address(&smem.tokens_empty[ring.stage]), ring.parity ^ 1);
            barrier_expect(full, span * (bytes + scale_bytes));
            bulk_copy(shared_address(smem.tokens[ring.stage]), values + static_cast<int64_t>(step) * bytes, span * bytes, full);
            bulk_copy(shared_address(smem.token_scales[ring.stage]), scales + step * groups * tile.rows, span * scale_bytes, full);
            ring.next(V::kTokenStages);
        }
    }
}

__device__ __forceinline__ uint32_t pick(uint32_t small, uint32_t large, uint32_t codes) {
    uint32_t bytes;  // as asm, or the compiler masks each half of the codes by itself
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(small), "r"(large), "r"(codes));
    return bytes;
}

// E5M2 of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in a group `below` octaves below its row's largest exponent.
struct Magnitudes {
    uint32_t small, large;
    __device__ __forceinline__ explicit Magnitudes(uint32_t below) {
        below = min(below, static_cast<uint32_t>(kFolds));
        small = 0x72706C00u - below * 0x04040400u;
        large = 0x7A787674u - below * 0x04040404u;
    }
};

// Eight values of one row -> two registers of four E5M2 values.
__device__ __forceinline__ void decode(uint32_t word, const Magnitudes& by, uint32_t& low, uint32_t& high) {
    const uint32_t codes = word & 0x77777777u;
    low = pick(by.small, by.large, codes) | (word & 0x80808080u);
    high = pick(by.small, by.large, codes >> 16) | ((word << 4) & 0x80808080u);
}

// The 64 rows of a warpgroup in one stage: 16 registers of A fragments, four for each 32 columns.
__device__ __forceinline__ void load_fragments(const uint8_t* weights, const uint8_t* scales, int thread, uint32_t (&a)[16]) {
    const uint4* words = reinterpret_cast<const uint4*>(weights) + thread;
    const uint32_t below = *reinterpret_cast<const uint32_t*>(scales + (thread / 32) * 64 + (thread % 32) / 2 * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 four = words[half * 128];
        const Magnitudes even(__byte_perm(below, 0, 0x4440 + 2 * half)), odd(__byte_perm(below, 0, 0x4441 + 2 * half));
        uint32_t* to = a + 8 * half;
        decode(four.x, even, to[0], to[2]);
        decode(four.y, odd, to[1], to[3]);
        decode(four.z, even, to[4], to[6]);
        decode(four.w, odd, to[5], to[7]);
    }
}

__device__ __forceinline__ uint64_t token_descriptor(uint32_t address) {  // K-major, 128-byte swizzle, 8 rows in 1 KiB
    return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(64) << 32) | (static_cast<uint64_t>(1) << 16) |
           ((address & 0x3FFFF) >> 4);
}

template <int kCount>
__device__ __forceinline__ void keep_in_registers(float (&values)[kCount]) {  // wgmma writes them behind the compiler
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Decodes a step's rows of this warpgroup and gives the stage back after its last step.
template <typename V>
__device__ __forceinline__ void next_fragments(Shared<V>& smem, Ring& ring, int part, bool last, uint32_t (&a)[16]) {
    const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128;
    if (part == 0) barrier_wait(shared_address(&smem.weights_full[ring.stage]), ring.parity);
    load_fragments(
        smem.weights[ring.stage] + part * kWeightBytes + warpgroup * (kWeightBytes / 2),
        smem.scales[ring.stage] + part * kScaleBytes + warpgroup * (kScaleBytes / 2), thread, a);
    if (part == V::kSpan - 1 || last) {
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(shared_address(&smem.weights_empty[ring.stage]));
        ring.next(V::kWeightStages);
    }
}

// A unit is one group of a stage's columns times one part of the tile's tokens. Queues it.
template <int kN, int kGroups>
__device__ __forceinline__ void queue_unit(uint32_t (&a)[16], uint64_t tokens, int unit, float (&product)[kN / 2]) {
    constexpr int kSteps = 4 / kGroups;
    const int group = unit % kGroups, part = unit / kGroups;
    keep_in_registers(product);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int step = group * kSteps + i;
        const uint64_t here = tokens + (part * kN * kTile + step * 32) / 16;
        wgmma<kN>(product, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3], here, i > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// scales: of this thread's two tokens in each eight, read before the wait for the product.
template <int kN>
__device__ __forceinline__ void add_unit(const float2 (&scales)[kN / 8], float (&product)[kN / 2], float (&sum)[kN / 2]) {
    keep_in_registers(product);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
        const float2 s = scales[j];
        sum[4 * j] += product[4 * j] * s.x;
        sum[4 * j + 1] += product[4 * j + 1] * s.y;
        sum[4 * j + 2] += product[4 * j + 2] * s.x;
        sum[4 * j + 3] += product[4 * j + 3] * s.y;
    }
}

template <int kValue>
struct Constant {
    static constexpr int value = kValue;
};

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float saturate(float x, float limit) {  // limit * tanh(x / limit)
    const float z = fminf(__fdividef(fabsf(x), limit), 15.0f);
    const float t = z < 0.05f ? z - z * z * z * (1.0f / 3) : 1.0f - __fdividef(2.0f, __expf(2 * z) + 1.0f);
    return copysignf(t * limit, x);
}

template <int kKind>
__device__ __forceinline__ float activate(float gate, float up, const Activation& by) {
    gate = __bfloat162float(__float2bfloat16_rn(gate));
    up = __bfloat162float(__float2bfloat16_rn(up));
    if (kKind == 0) return saturate(gate, by.beta) * sigmoid(gate) * saturate(up, by.linear);
    gate = gate > by.limit ? by.limit : gate;  // which a NaN passes
    up = up > by.limit ? by.limit : (up < -by.limit ? -by.limit : up);
    return gate * sigmoid(gate) * up;
}

__device__ __forceinline__ float row_scale(int largest) {  // 2^(largest - 140): E5M2's 2^13 stands for 2^0
    return __int_as_float(max(largest - 13, 1) << 23);
}

// First matrix: activation, routing weight, one scale for each token and 64 channels, E4M3 into the second's tiles.
template <int kN, int kParts, typename S>
__device__ __forceinline__ void finish_first(
    S& smem, const Buffers& b, const Shape& shape, const Activation& by, const Tile& tile, const Task& task, int parity,
    float (&sum)[kParts][kN / 2], float gate_scale, float up_scale) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, column = 2 * (lane % 4);
    uint32_t* largest = smem.largest[parity];
    const float* weights = reinterpret_cast<const float*>(smem.of_rows[parity]);
    float value[kParts * kN / 4], most[kParts * kN / 4];
    const auto activated = [&](auto kind) {
#pragma unroll
        for (int j = 0; j < kParts * kN / 8; ++j) {
            const float* v = &sum[j / (kN / 8)][j % (kN / 8) * 4];
            const float2 weight = *reinterpret_cast<const float2*>(weights + 8 * j + column);
            value[2 * j] = activate<decltype(kind)::value>(v[0] * gate_scale, v[2] * up_scale, by) * weight.x;
            value[2 * j + 1] = activate<decltype(kind)::value>(v[1] * gate_scale, v[3] * up_scale, by) * weight.y;
        }
    };
    if (by.kind == 0)
        activated(Constant<0>{});
    else
        activated(Constant<1>{});
#pragma unroll
    for (int i = 0; i < kParts * kN / 4; ++i) most[i] = fabsf(value[i]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kParts * kN / 4; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], distance));
    }
    if (lane < 4) {
#pragma unroll
        for (int i = 0; i < kParts * kN / 4; ++i) atomicMax(largest + i / 2 * 8 + column + i % 2, __float_as_uint(most[i]));
    }
    consumers_sync();
    const int channel = warp * 8 + lane / 4, place = channel / 4 % 4 * 16 + channel / 16 * 4 + channel % 4;
#pragma unroll
    for (int i = 0; i < kParts * kN / 4; ++i) {
        const int token = i / 2 * 8 + column + i % 2;
        const float inverse = __fdividef(448.0f, fmaxf(__uint_as_float(largest[token]), 1e-10f));
        smem.staged[token * kPitch + place] = __nv_cvt_float_to_fp8(value[i] * inverse, __NV_SATFINITE, __NV_E4M3);
    }
    const int groups = shape.inner / 64;
    for (int token = thread; token < tile.rows; token += kConsumers)
        b.hs[static_cast<int64_t>(tile.row) * groups + task.matrix_tile * tile.rows + token] =
            fmaxf(__uint_as_float(largest[token]), 1e-10f) / 448.0f;
    consumers_sync();
    for (int token = thread; token < kParts * kN; token += kConsumers) largest[token] = 0;
    uint8_t* to = b.hq + static_cast<int64_t>(tile.row) * shape.inner + static_cast<int64_t>(task.matrix_tile / 2) * tile.rows * kTile;
    for (int i = thread; i < tile.rows * 4; i += kConsumers) {
        const int token = i / 4, chunk = (task.matrix_tile % 2) * 4 + i % 4;
        *reinterpret_cast<uint4*>(to + token * kTile + ((chunk ^ (token % 8)) * 16)) =
            *reinterpret_cast<const uint4*>(smem.staged + token * kPitch + i % 4 * 16);
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    consumers_sync();
    if (thread == 0) {
        __threadfence();
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(b.done + task.tile) : "memory");
    }
}

// Second matrix: BF16 rows of the pairs. Physical rows g and g + 8 of a warp are neighbouring features.
template <int kN, int kParts, typename S>
__device__ __forceinline__ void finish_second(
    S& smem, const Buffers& b, const Shape& shape, const Task& task, int parity, float (&sum)[kParts][kN / 2],
    float even_scale, float odd_scale) {
    const int thread = threadIdx.x, lane = thread % 32;
    __nv_bfloat16* out = b.out + task.matrix_tile * kTile + thread / 32 * 16 + lane / 4 * 2;
    const int* pairs = smem.of_rows[parity] + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kParts * kN / 8; ++j) {
        const float* v = &sum[j / (kN / 8)][j % (kN / 8) * 4];
        const int2 pair = *reinterpret_cast<const int2*>(pairs + 8 * j);
        if (pair.x >= 0)
            *reinterpret_cast<__nv_bfloat162*>(out + static_cast<int64_t>(pair.x) * shape.hidden) =
                __floats2bfloat162_rn(v[0] * even_scale, v[2] * odd_scale);
        if (pair.y >= 0)
            *reinterpret_cast<__nv_bfloat162*>(out + static_cast<int64_t>(pair.y) * shape.hidden) =
                __floats2bfloat162_rn(v[1] * even_scale, v[3] * odd_scale);
    }
}

struct Rings {
    Ring weights, tokens;
};

template <int kN, int kParts, bool kFirst, typename V>
__device__ __forceinline__ void run_task(
    Shared<V>& smem, const Buffers& b, const Shape& shape, const Activation& by, const Tile& tile, const Task& task, Rings& rings,
    int parity) {
    constexpr int kGroups = kFirst ? 1 : 2, kUnits = kParts * kGroups;
    const int thread = threadIdx.x, lane = thread % 32;
    const int steps = (kFirst ? shape.hidden : shape.inner) / kTile;
    const int matrix_tiles = (kFirst ? 2 * shape.inner : shape.hidden) / kTile;
    const int64_t block = static_cast<int64_t>(tile.expert) * matrix_tiles + task.matrix_tile;
    const uint8_t* exponents =
        (kFirst ? b.s13 : b.s2) + (block + 1) * (steps * kScaleBytes + kTile) - kTile + thread / 32 * 16 + lane / 4;
    const int* rows = kFirst ? reinterpret_cast<const int*>(b.row_weight) : b.row_pair;
    const int low = exponents[0], high = exponents[8];  // loaded now, looked at after the last step
    const int of_row = thread < tile.rows ? rows[tile.row + thread] : (kFirst ? 0 : -1);
    Ring weights = rings.weights, tokens = rings.tokens;
    float sum[kParts][kN / 2], product[kUnits > 1 ? 2 : 1][kN / 2];
#pragma unroll
    for (int i = 0; i < kParts * kN / 2; ++i) sum[i / (kN / 2)][i % (kN / 2)] = 0;
    uint32_t a[2][16];
    next_fragments<V>(smem, weights, 0, steps == 1, a[0]);
    // Queues a unit, then adds the one before it, so that the tensor cores have the next. None is left for the next
    // step: ptxas would wait for each by itself.
    const auto multiply = [&](int part_of_span, uint32_t(&now)[16], auto&& prefetch) {
        const uint64_t descriptor =
            token_descriptor(shared_address(smem.tokens[tokens.stage]) + part_of_span * tile.rows * kTile);
        const float* scales =
            smem.token_scales[tokens.stage] + part_of_span * kGroups * tile.rows + 2 * (lane % 4);
        queue_unit<kN, kGroups>(now, descriptor, 0, product[0]);
        prefetch();
#pragma unroll
        for (int unit = 1; unit <= kUnits; ++unit) {
            const int group = (unit - 1) % kGroups, part = (unit - 1) / kGroups;
            float2 of_tokens[kN / 8];
#pragma unroll
            for (int j = 0; j < kN / 8; ++j)
                of_tokens[j] = *reinterpret_cast<const float2*>(scales + group * tile.rows + part * kN + 8 * j);
            if (unit < kUnits) {
                queue_unit<kN, kGroups>(now, descriptor, unit, product[unit % 2]);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            } else {
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            }
            add_unit<kN>(of_tokens, product[(unit - 1) % 2], sum[part]);
        }
    };
    for (int step = 0; step < steps; step += V::kSpan) {
        barrier_wait(shared_address(&smem.tokens_full[tokens.stage]), tokens.parity);
        multiply(0, a[0], [&] {
            if (step + 1 < steps) next_fragments<V>(smem, weights, 1 % V::kSpan, step + 2 == steps, a[1]);
        });
        if constexpr (V::kSpan == 1) {
#pragma unroll
            for (int i = 0; i < 16; ++i) a[0][i] = a[1][i];
        } else if (step + 1 < steps) {
            multiply(1, a[1], [&] {
                if (step + 2 < steps) next_fragments<V>(smem, weights, 0, step + 3 == steps, a[0]);
            });
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&smem.tokens_empty[tokens.stage]));
        tokens.next(V::kTokenStages);
    }
    rings = {weights, tokens};
    if (thread < kParts * kN) smem.of_rows[parity][thread] = of_row;
    consumers_sync();
    if constexpr (kFirst)
        finish_first<kN, kParts>(smem, b, shape, by, tile, task, parity, sum, row_scale(low), row_scale(high));
    else
        finish_second<kN, kParts>(smem, b, shape, task, parity, sum, row_scale(low), row_scale(high));
}

template <bool kFirst, typename V>
__device__ __forceinline__ void run_sized(
    Shared<V>& smem, const Buffers& b, const Shape& shape, const Activation& by, const Tile& tile, const Task& task,
    Rings& rings, int parity) {
#define RUN(N, PARTS) \
    if (tile.rows <= (N) * (PARTS)) \
        return run_task<N, PARTS, kFirst, V>(smem, b, shape, by, tile, task, rings, parity)
#if TOKENS == 32
    RUN(8, 1);
    RUN(16, 1);
    RUN(24, 1);
    RUN(32, 1);
#else
    RUN(32, 1);
    RUN(64, 1);
    RUN(96, 1);
    RUN(64, 2);
    RUN(64, 3);
    RUN(56, 4);
#endif
#undef RUN
}

__device__ __forceinline__ void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <typename V>
__global__ void __launch_bounds__(kThreads, V::kBlocks) experts_kernel(
    const __grid_constant__ Buffers b, const __grid_constant__ Shape shape, const __grid_constant__ Activation by) {
    extern __shared__ __align__(1024) uint8_t raw[];
    Shared<V>& smem = *reinterpret_cast<Shared<V>*>(raw);
    if (threadIdx.x == 0) {
        for (int i = 0; i < V::kWeightStages; ++i) {
            barrier_init(shared_address(&smem.weights_full[i]), 1);
            barrier_init(shared_address(&smem.weights_empty[i]), kConsumers / 32);
        }
        for (int i = 0; i < V::kTokenStages; ++i) {
            barrier_init(shared_address(&smem.tokens_full[i]), 1);
            barrier_init(shared_address(&smem.tokens_empty[i]), kConsumers / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    for (int i = threadIdx.x; i < 2 * V::kTokens; i += kThreads) smem.largest[i / V::kTokens][i % V::kTokens] = 0;
    wait_for_previous_launch();
    allow_next_launch();
    const int tiles = b.state[0];
    for (int i = threadIdx.x; i < min(tiles, kCachedTiles); i += kThreads) smem.tiles[i] = b.tiles[i];
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(V::kSpare));
        asm volatile("fence.proxy.async;" ::: "memory");
        if (threadIdx.x == kConsumers) stream_weights<V>(smem, b, shape, tiles);
        if (threadIdx.x == kConsumers + 32) stream_tokens<V>(smem, b, shape, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(V::kRegisters));
        const int first_tiles = 2 * shape.inner / kTile, second_tiles = shape.hidden / kTile;
        const int tasks = tiles * (first_tiles + second_tiles);
        Rings rings;
        int parity = 0;
        for (int index = blockIdx.x; index < tasks; index += gridDim.x) {
            const Task task = task_at(index, tiles, first_tiles, second_tiles);
            const Tile tile = tile_at(smem, b, task.tile);
            if (task.first)
                run_sized<true, V>(smem, b, shape, by, tile, task, rings, parity);
            else
                run_sized<false, V>(smem, b, shape, by, tile, task, rings, parity);
            parity ^= 1;
        }
    }
}

__device__ __forceinline__ int rounded(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// One block. Pairs keep their order within an expert, so that a row's place follows from the ids alone.
__global__ void __launch_bounds__(1024, 1) route_kernel(Buffers b, Shape shape) {
    extern __shared__ int counts[];  // [32 warps][experts], then the experts' first tiles and rows of a tile
    __shared__ int sums[2][32];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, experts = shape.experts;
    int* first_tile = counts + 32 * experts;
    int* tile_rows = first_tile + experts;
    const int pairs = shape.tokens * shape.slots, segment = rounded((pairs + 31) / 32, 32);
    const int begin = min(warp * segment, pairs), end = min(begin + segment, pairs);
    allow_next_launch();
    for (int i = thread; i < 32 * experts; i += 1024) counts[i] = 0;
    for (int i = thread; i < shape.max_tiles; i += 1024) b.done[i] = 0;
    if (thread == 0) b.state[1] = 0;
    __syncthreads();
#pragma unroll 4
    for (int p = begin + lane; p < end; p += 32) {
        const int64_t id = b.topk_idx[p];
        if (id >= 0 && id < experts) atomicAdd(&counts[warp * experts + id], 1);
        if (id >= experts) b.state[1] = 1;
    }
    __syncthreads();
    int total = 0, tiles = 0, per_tile = 0, padded = 0;
    if (thread < experts) {
        for (int w = 0; w < 32; ++w) {
            const int count = counts[w * experts + thread];
            counts[w * experts + thread] = total;
            total += count;
        }
        if (total) {
            tiles = (total + shape.max_tile - 1) / shape.max_tile;
            per_tile = rounded((total + tiles - 1) / tiles, 8);
            padded = (tiles - 1) * per_tile + rounded(total - (tiles - 1) * per_tile, 8);
        }
    }
    int tile_end = tiles, row_end = padded;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int t = __shfl_up_sync(~0u, tile_end, distance), r = __shfl_up_sync(~0u, row_end, distance);
        if (lane >= distance) {
            tile_end += t;
            row_end += r;
        }
    }
    if (lane == 31) {
        sums[0][warp] = tile_end;
        sums[1][warp] = row_end;
    }
    __syncthreads();
    for (int w = 0; w < warp; ++w) {
        tile_end += sums[0][w];
        row_end += sums[1][w];
    }
    if (thread == 1023) b.state[0] = tile_end;
    if (thread < experts) {
        first_tile[thread] = tile_end - tiles;
        tile_rows[thread] = per_tile;
        for (int t = 0; t < tiles; ++t) {
            const int row = row_end - padded + t * per_tile;
            b.tiles[tile_end - tiles + t] = {thread, row, min(per_tile, row_end - row)};
        }
        for (int row = row_end - padded + total; row < row_end; ++row) {
            b.row_pair[row] = -1;
            b.row_weight[row] = 0;
        }
    }
    __syncthreads();
    int64_t id = begin + lane < end ? b.topk_idx[begin + lane] : -1;
    for (int start = begin; start < end; start += 32) {
        const int p = start + lane, next = p + 32;
        const int64_t next_id = next < end ? b.topk_idx[next] : -1;
        const int key = id >= 0 && id < experts ? static_cast<int>(id) : -1;
        uint32_t same = __ballot_sync(~0u, key >= 0);
        for (int bit = 1; bit < experts; bit *= 2) {
            const uint32_t set = __ballot_sync(~0u, key & bit);
            same &= key & bit ? set : ~set;
        }
        int rank = 0;
        if (key >= 0) rank = counts[warp * experts + key] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (key >= 0 && lane == __ffs(same) - 1) counts[warp * experts + key] += __popc(same);
        __syncwarp();
        if (p < end)
            b.place[p] = key < 0 ? -1 : (first_tile[key] + rank / tile_rows[key]) << kRankBits | rank % tile_rows[key];
        id = next_id;
    }
}

// One block for each token: E4M3 by groups of 128 columns, copied into the tile of each of its experts.
__global__ void __launch_bounds__(256) pack_kernel(Buffers b, Shape shape) {
    const int token = blockIdx.x, groups = shape.hidden / kTile;
    wait_for_previous_launch();
    allow_next_launch();
    if (threadIdx.x < shape.slots) {
        const int pair = token * shape.slots + threadIdx.x, place = b.place[pair];
        if (place >= 0) {
            const int row = b.tiles[place >> kRankBits].row + (place & ((1 << kRankBits) - 1));
            b.row_pair[row] = pair;
            b.row_weight[row] = b.topk_weights[pair];
        }
    }
    for (int chunk = threadIdx.x; chunk < shape.hidden / 16; chunk += 256) {
        const int group = chunk / 8;
        uint4 packed;
        float scale;
        if (b.x_scale != nullptr) {
            packed = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(b.x) + static_cast<int64_t>(token) * shape.hidden)[chunk];
            scale = b.x_scale[static_cast<int64_t>(token) * groups + group];
        } else {
            const uint4* from = reinterpret_cast<const uint4*>(
                static_cast<const __nv_bfloat16*>(b.x) + static_cast<int64_t>(token) * shape.hidden) + 2 * chunk;
            const uint4 halves[2] = {from[0], from[1]};
            const __nv_bfloat16* values = reinterpret_cast<const __nv_bfloat16*>(halves);
            float wide[16], largest = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                wide[i] = __bfloat162float(values[i]);
                largest = fmaxf(largest, fabsf(wide[i]));
            }
            const uint32_t lanes = 0xFFu << (threadIdx.x % 32 / 8 * 8);  // a group's eight threads are all here
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, distance));
            scale = fmaxf(largest, 1e-10f) / 448.0f;
            uint8_t* bytes = reinterpret_cast<uint8_t*>(&packed);
#pragma unroll
            for (int i = 0; i < 16; ++i) bytes[i] = __nv_cvt_float_to_fp8(wide[i] / scale, __NV_SATFINITE, __NV_E4M3);
        }
        for (int slot = 0; slot < shape.slots; ++slot) {
            const int place = b.place[token * shape.slots + slot];
            if (place < 0) continue;
            const Tile tile = b.tiles[place >> kRankBits];
            const int row = place & ((1 << kRankBits) - 1);
            uint8_t* to = b.xq + static_cast<int64_t>(tile.row) * shape.hidden + (static_cast<int64_t>(group) * tile.rows + row) * kTile;
            const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<uint32_t*>(to + ((chunk % 8 / 4 * 4 + i) ^ (row % 8)) * 16 + chunk % 4 * 4) = words[i];
            if (chunk % 8 == 0) b.xs[static_cast<int64_t>(tile.row) * groups + group * tile.rows + row] = scale;
        }
    }
}

// y = bf16(float32 sum over the slots in their order).
__global__ void __launch_bounds__(256) combine_kernel(Buffers b, Shape shape) {
    const int token = blockIdx.x, chunk = blockIdx.y * 256 + threadIdx.x;
    if (chunk >= shape.hidden / 8) return;
    wait_for_previous_launch();
    float sum[8] = {};
    for (int slot = 0; slot < shape.slots; ++slot) {
        const int pair = token * shape.slots + slot;
        if (b.place[pair] < 0) continue;
        const uint4 eight = reinterpret_cast<const uint4*>(b.out + static_cast<int64_t>(pair) * shape.hidden)[chunk];
        const __nv_bfloat16* values = reinterpret_cast<const __nv_bfloat16*>(&eight);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += __bfloat162float(values[i]);
    }
    uint4 packed;
    __nv_bfloat16* values = reinterpret_cast<__nv_bfloat16*>(&packed);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __float2bfloat16_rn(sum[i]);
    reinterpret_cast<uint4*>(b.y + static_cast<int64_t>(token) * shape.hidden)[chunk] = packed;
}

#if TOKENS == 32
using Built = Variant<32, 2, 4, 4, 2, 104, 32>;
#else
using Built = Variant<224, 1, 6, 4, 1, 232, 40>;
#endif

// Launches a kernel that may begin before the one in front of it has ended, and waits for it itself.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(
    void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// Blocks that are on the device at once: `experts` waits for work of other blocks.
cudaError_t resident_blocks(int* blocks) {
    int device, processors, at_once;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int bytes = sizeof(Shared<Built>);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(experts_kernel<Built>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, experts_kernel<Built>, kThreads, bytes);
    if (error == cudaSuccess && at_once < 1) error = cudaErrorLaunchOutOfResources;
    *blocks = processors * (at_once < Built::kBlocks ? at_once : Built::kBlocks);
    return error;
}

}  // namespace

// Queues all launches. combine: 0 leaves out [T * K, H] as the result. Returns a cudaError_t.
extern "C" int mega_moe_launch(const Buffers* b, const Shape* shape, const Activation* by, int combine, void* queue) {
    const cudaStream_t stream = static_cast<cudaStream_t>(queue);
    static int blocks = 0;
    cudaError_t error = blocks ? cudaSuccess : resident_blocks(&blocks);
    const int route_bytes = 34 * shape->experts * sizeof(int);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, route_bytes);
    if (error != cudaSuccess) return error;
    route_kernel<<<1, 1024, route_bytes, stream>>>(*b, *shape);
    error = cudaGetLastError();
    if (error == cudaSuccess) error = launch(pack_kernel, shape->tokens, 256, 0, stream, *b, *shape);
    if (error == cudaSuccess)
        error = launch(experts_kernel<Built>, blocks, kThreads, sizeof(Shared<Built>), stream, *b, *shape, *by);
    if (error != cudaSuccess || !combine) return error;
    const dim3 grid(shape->tokens, (shape->hidden / 8 + 255) / 256);
    return launch(combine_kernel, grid, 256, 0, stream, *b, *shape);
}

extern "C" const char* mega_moe_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
