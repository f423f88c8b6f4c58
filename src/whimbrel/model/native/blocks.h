// Blocks in which attention takes queries and keys, and the packing of rows as columns of a product.
#pragma once

#include <algorithm>
#include <cstring>

#include "product.h"

namespace whimbrel {

constexpr i64 BLOCK_KEYS = HAS_TILES ? 256 : 512, BLOCK_QUERIES = HAS_TILES ? 32 : 24;
constexpr i64 SCORES_STRIDE = BLOCK_KEYS + 32;  // of scores and weights: rows that are no multiple of 512 bytes apart

template <class T>
struct Rows {
    const T* data;
    i64 row_stride, head_stride;  // in numbers
};

// Write unit u of row r, of a panel of rows, to out[u * stride + r].
inline void transpose(const u32 (*rows)[W], i64 num_units, u32* out, i64 stride = PANEL) {
    for (int half = 0; half < NV; half++) Transpose(rows + half * W, num_units, out + half * W, stride);
}

// Write a row as units, with zeros after its numbers. Return the power of 2 that it was multiplied with, or 1.
template <class D, class T>
float pack_row(const T* row, i64 width, i64 units, u32* out) {
    std::fill(out + width / D::per_unit, out + units, 0u);
    const float factor = D::scaled ? power_to_reach(3, largest_magnitude(row, width)) : 1.0f;
    for_vectors(width, [&](i64 k, auto some) {
        const Floats x = LoadN(row + k, some);
        StoreN(D::scaled ? Mul(x, Set(factor)) : x, reinterpret_cast<typename D::Number*>(out) + k, some);
    });
    return factor;
}

// Unit u of row `row`, of a panel of rows: the layout in which keys are the columns of a product. `row_at(row)` is
// where a row lies. With `scales`, rows are divided by them.
template <class D, class F>
void pack_rows_as_columns(F row_at, i64 count, i64 width, i64 units, [[maybe_unused]] const float* scales, u32* out) {
    alignas(64) u32 part[PANEL][W];
    for (i64 row = 0; row < count; row += PANEL)
        for (i64 unit = 0; unit < units; unit += W) {
            const i64 num_units = std::min<i64>(W, units - unit);
            for (i64 r = 0; r < PANEL; r++) {
                if (row + r >= count) {
                    std::memset(part[r], 0, sizeof part[r]);
                    continue;
                }
                const auto* in = row_at(row + r) + unit * D::per_unit;
                auto* numbers = reinterpret_cast<typename D::Number*>(part[r]);
                for (i64 j = 0, left = width - unit * D::per_unit; j < D::per_unit; j++, left -= W) {
                    Floats x = left > 0 ? LoadN(in + j * W, std::min<i64>(left, W)) : Zero();
                    if constexpr (D::scaled) x = Mul(x, Set(inverse_of_power(scales[row + r])));
                    StoreU(x, numbers + j * W);
                }
            }
            transpose(part, num_units, out + row * units + unit * PANEL);
        }
}

}  // namespace whimbrel
