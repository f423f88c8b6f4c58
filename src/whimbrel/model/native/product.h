// Products of a block of rows and a panel of columns, from which linear layers and attention are built.
//
// A panel has 2 W columns. Along the inner dimension numbers lie in units of 4 bytes: a float32, two bfloat16 or
// float16, or four int8. A unit of each row is multiplied with the units of all columns of the panel, in order of the
// inner dimension. So a number of the result has the same bits in every number of rows and in every block.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace whimbrel {

constexpr bool HAS_TILES = Tiling<InBfloat16>::units > 1;

// Rows to whose multiples memory of rows and sums is padded.
template <class D>
constexpr i64 ROW_STEP = std::max<i64>(MAX_ROWS, Tiling<D>::rows);

// Units of n numbers, with those that fill the last tile.
template <class D>
constexpr i64 units_for(i64 n) {
    return up_to((n + D::per_unit - 1) / D::per_unit, Tiling<D>::units);
}

// Call f with the tag of a kind. It is that of float32 unless the kind is among `D` and `Others`, and the instruction
// set has it.
template <class D, class... Others, class F>
void with_numbers(i64 kind, F f) {
    if constexpr (HAS<D>)
        if (kind == D::kind) return f(D{});
    if constexpr (sizeof...(Others) > 0) with_numbers<Others...>(kind, f);
    else f(InFloat32{});
}

inline Floats ZeroSums(InFloat32) { return Zero(); }
inline Floats LoadColumns(InFloat32, const u32* p) { return LoadU(reinterpret_cast<const float*>(p)); }
inline Floats Dot(InFloat32, Floats sum, const u32* row, Floats columns) {
    float x;
    std::memcpy(&x, row, sizeof x);
    return MulAdd(Set(x), columns, sum);
}
inline Floats Total(InFloat32, Floats x) { return x; }

inline Ints ZeroSums(InInt8) { return Set(i32{0}); }
inline Ints LoadColumns(InInt8, const u32* p) { return LoadU(reinterpret_cast<const i32*>(p)); }
inline Ints Total(InInt8, Ints x) { return x; }

// `ahead`: units from those that are multiplied to those that are fetched.
template <class D, int ROWS, int VECTORS>
inline void tile(const u32* a, i64 a_stride, const u32* panel, i64 units, typename D::Sum* c, i64 c_stride, bool begin,
                 i64 ahead) {
    using Vector = decltype(ZeroSums(D{}));
    Vector sums[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) sums[i][j] = ZeroSums(D{});
#pragma GCC unroll UNROLL
    for (i64 k = 0; k < units; k++) {
        for (int j = 0; j < VECTORS; j += LINE / W) Prefetch(panel + (k + ahead) * PANEL + j * W);
        Vector columns[VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) columns[j] = LoadColumns(D{}, panel + k * PANEL + j * W);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++) sums[i][j] = Dot(D{}, sums[i][j], a + i * a_stride + k, columns[j]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        auto* to = c + i * c_stride;
        if constexpr (sizeof(typename D::Sum) == 2) {
            StoreTotals(sums[i], to);
        } else {
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++) {
                const auto total = Total(D{}, sums[i][j]);
                StoreU(begin ? total : Add(LoadU(to + j * W), total), to + j * W);  // a sum per block: less is lost
            }
        }
    }
}

template <class D, int VECTORS, int ROWS = MAX_ROWS>
inline void tile_of(int rows, const u32* a, i64 a_stride, const u32* panel, i64 units, typename D::Sum* c, i64 c_stride,
                    bool begin, i64 ahead) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) tile<D, ROWS, VECTORS>(a, a_stride, panel, units, c, c_stride, begin, ahead);
        else tile_of<D, VECTORS, ROWS - 1>(rows, a, a_stride, panel, units, c, c_stride, begin, ahead);
    }
}

// c = a x panel, or c += a x panel unless `begin`; with `half`, of the panel's first W columns. Rows are shared evenly
// among tiles, as small tiles are slow.
template <class D>
__attribute__((noinline)) void product(i64 rows, const u32* a, i64 a_stride, const u32* panel, i64 units,
                                       typename D::Sum* c, i64 c_stride, bool begin, bool half = false) {
    if constexpr (Tiling<D>::units > 1)
        return ProductOfTiles(D{}, rows, a, a_stride, panel, units, c, c_stride, begin, half);
    const i64 tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, least_rows = rows / std::max<i64>(1, tiles);
    const i64 larger = rows - tiles * least_rows;
    for (i64 k = 0; k < units; k += D::most_units, begin = false) {
        const i64 some = std::min(D::most_units, units - k);
        for (i64 t = 0, row = 0; t < tiles; t++) {
            const int count = static_cast<int>(least_rows + (t < larger));
            // The second tile, whose panel is in the L1 cache, fetches the next one.
            const i64 ahead = t == 1 ? some : FETCH_AHEAD / PANEL;
            if (half)
                tile_of<D, 1>(count, a + row * a_stride + k, a_stride, panel + k * PANEL, some, c + row * c_stride,
                              c_stride, begin, ahead);
            else
                tile_of<D, 2>(count, a + row * a_stride + k, a_stride, panel + k * PANEL, some, c + row * c_stride,
                              c_stride, begin, ahead);
            row += count;
        }
    }
}

}  // namespace whimbrel
