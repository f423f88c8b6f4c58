// Blocks in which attention takes queries and keys, and the packing of rows as columns of a product.
#pragma once

#include <algorithm>

#include "product.h"

namespace whimbrel {

#ifdef WHIMBREL_TILES
constexpr i64 BLOCK_KEYS = 256, BLOCK_QUERIES = 2 * TILE_ROWS;
#else
constexpr i64 BLOCK_KEYS = 512, BLOCK_QUERIES = 24;
#endif
constexpr i64 SCORES_STRIDE = BLOCK_KEYS + 32;  // of scores and weights: rows that are no multiple of 512 bytes apart

template <class T>
struct Rows {
    const T* data;
    i64 row_stride, head_stride;  // in numbers
};

// Write unit u of row r to out[u * stride + r].
inline void transpose(const std::uint32_t (*rows)[W], i64 num_units, std::uint32_t* out, i64 stride = PANEL) {
#ifdef __AVX512F__
    for (int half = 0; half < NV; half++) {
        __m512i x[W], y[W];
        for (int r = 0; r < W; r++) x[r] = _mm512_load_si512(rows[half * W + r]);
        for (int r = 0; r < W; r += 2) y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]), y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
        for (int r = 0; r < W; r += 4)
            for (int c = 0; c < 2; c++) {
                x[r + 2 * c] = _mm512_unpacklo_epi64(y[r + c], y[r + 2 + c]);
                x[r + 2 * c + 1] = _mm512_unpackhi_epi64(y[r + c], y[r + 2 + c]);
            }
        for (int r = 0; r < W; r += 8)
            for (int c = 0; c < 4; c++) {
                y[r + c] = _mm512_shuffle_i32x4(x[r + c], x[r + 4 + c], 0x88);
                y[r + 4 + c] = _mm512_shuffle_i32x4(x[r + c], x[r + 4 + c], 0xdd);
            }
        for (int c = 0; c < 8; c++) {
            x[c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0x88);
            x[8 + c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0xdd);
        }
        for (int u = 0; u < num_units; u++) _mm512_store_si512(out + u * stride + half * W, x[u]);
    }
#else
    for (int half = 0; half < NV; half++) {
        __m256 x[W], y[W];
        for (int r = 0; r < W; r++) x[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[half * W + r]));
        for (int r = 0; r < W; r += 2) y[r] = _mm256_unpacklo_ps(x[r], x[r + 1]), y[r + 1] = _mm256_unpackhi_ps(x[r], x[r + 1]);
        for (int r = 0; r < W; r += 4)
            for (int c = 0; c < 2; c++) {
                x[r + 2 * c] = _mm256_shuffle_ps(y[r + c], y[r + 2 + c], 0x44);
                x[r + 2 * c + 1] = _mm256_shuffle_ps(y[r + c], y[r + 2 + c], 0xee);
            }
        for (int c = 0; c < 4; c++) {
            y[c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x20);
            y[4 + c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x31);
        }
        for (int u = 0; u < num_units; u++) _mm256_storeu_ps(reinterpret_cast<float*>(out) + u * stride + half * W, y[u]);
    }
#endif
}

// Unit u of row `row`, of a panel of rows: the layout in which keys are the columns of a product. `row_at(row)` is where a row lies. With
// `scales`, rows are divided by them.
template <class D, class F>
void pack_rows_as_columns(F row_at, i64 count, i64 width, i64 units, [[maybe_unused]] const float* scales, std::uint32_t* out) {
    alignas(64) std::uint32_t part[PANEL][W];
    for (i64 row = 0; row < count; row += PANEL)
        for (i64 unit = 0; unit < units; unit += W) {
            const i64 num_units = std::min<i64>(W, units - unit);
            for (i64 r = 0; r < PANEL; r++) {
                if (row + r >= count) {
                    std::memset(part[r], 0, sizeof part[r]);
                    continue;
                }
                const i64 from = unit * D::per_unit, left = std::max<i64>(0, width - from);
                const auto* in = row_at(row + r) + from;
                if constexpr (D::per_unit == 1) {
                    store(reinterpret_cast<float*>(part[r]), load(in, std::min<i64>(left, W)));
                } else {
                    auto* halves = reinterpret_cast<std::uint16_t*>(part[r]);
                    const Floats factor = all(D::scaled ? inverse_of_power(scales[row + r]) : 1.0f);
                    D::put(halves, mul(load(in, std::min<i64>(left, W)), factor), W);
                    D::put(halves + W, left > W ? mul(load(in + W, std::min<i64>(left - W, W)), factor) : zero(), W);
                }
            }
            std::uint32_t* to = out + row * units + unit * PANEL;
            transpose(part, num_units, to);
        }
}

}  // namespace whimbrel
