// Rows of embedding tables, and rows that are pooled.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace whimbrel {

constexpr i64 AHEAD = 2;  // rows that are fetched before they are added

struct Table {
    const void* rows;
    bool narrow;  // bfloat16, else float32
    i64 count;
    const i32* chosen;
};

template <class T>
void add_row(const T* row, i64 width, bool first, float* out) {
    for_vectors(width, [&](i64 k, auto some) {
        const Floats x = LoadN(row + k, some);
        StoreN(first ? x : Add(LoadN(out + k, some), x), out + k, some);
    });
}

// Write the sums of the chosen rows of all tables, added in order. False if a chosen row does not exist.
inline bool sum_of_tables(const Table* tables, int num_tables, i64 rows, i64 width, float* out) {
    for (int t = 0; t < num_tables; t++)
        for (i64 r = 0; r < rows; r++)
            if (tables[t].chosen[r] < 0 || tables[t].chosen[r] >= tables[t].count) return false;
    const i64 row_bytes = width * static_cast<i64>(tables[0].narrow ? sizeof(bf16) : sizeof(float));
    for (i64 r = 0; r < rows; r++) {
        if (r + AHEAD < rows)  // the first table is large, and its rows are chosen at random
            for (i64 byte = 0; byte < row_bytes; byte += 64)
                Prefetch(static_cast<const char*>(tables[0].rows) + tables[0].chosen[r + AHEAD] * row_bytes + byte);
        for (int t = 0; t < num_tables; t++) {
            const i64 start = tables[t].chosen[r] * width;
            if (tables[t].narrow)
                add_row(static_cast<const bf16*>(tables[t].rows) + start, width, t == 0, out + r * width);
            else add_row(static_cast<const float*>(tables[t].rows) + start, width, t == 0, out + r * width);
        }
    }
    return true;
}

// Write the mean of rows starts[i] to ends[i] for each i, added in order. That of no rows is NaN.
inline void means(const float* x, i64 width, const i32* starts, const i32* ends, i64 count, float* out) {
    for (i64 i = 0; i < count; i++) {
        float* to = out + i * width;
        const Floats divisor = Set(static_cast<float>(std::max(0, ends[i] - starts[i])));
        for_vectors(width, [&](i64 k, auto some) { StoreN(Zero(), to + k, some); });
        for (i64 r = starts[i]; r < ends[i]; r++) add_row(x + r * width, width, false, to);
        for_vectors(width, [&](i64 k, auto some) { StoreN(Div(LoadN(to + k, some), divisor), to + k, some); });
    }
}

// Divide rows by their Euclidean norm, or by `least` if that is more. A row whose norm overflows becomes NaN.
inline void normalize(const float* x, i64 rows, i64 width, float least, float* out) {
    for (i64 r = 0; r < rows; r++) {
        Floats squares = Zero();
        for_vectors(width, [&](i64 k, auto some) {
            const Floats v = LoadN(x + r * width + k, some);
            squares = MulAdd(v, v, squares);
        });
        const float norm = std::sqrt(ReduceSum(squares));
        const float divisor = std::isinf(norm) ? std::numeric_limits<float>::quiet_NaN() : norm < least ? least : norm;
        for_vectors(width, [&](i64 k, auto some) {
            StoreN(Div(LoadN(x + r * width + k, some), Set(divisor)), out + r * width + k, some);
        });
    }
}

}  // namespace whimbrel
