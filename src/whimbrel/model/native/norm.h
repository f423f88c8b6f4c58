// Layer norm and RMS norm of rows, after an optional addition, in one pass over memory.
#pragma once

#include <cmath>

#include "simd.h"

namespace whimbrel {

// Write norm(x + y) * weight + bias as float32, row by row. `y` and `bias` may be null. `out` may be `x`.
template <bool centred, class Y>
void norm(const float* x, const Y* y, const float* weight, const float* bias, double eps, i64 rows, i64 width, float* out) {
    for (i64 r = 0; r < rows; r++) {
        const float* in = x + r * width;
        float* to = out + r * width;
        Floats total = zero();
        for_vectors(width, [&](i64 k, auto some) {
            Floats v = load(in + k, some);
            if (y != nullptr) v = add(v, load(y + r * width + k, some));
            store(to + k, v, some);
            if constexpr (centred) total = add(total, v);
        });
        const float mean = centred ? sum(total) / static_cast<float>(width) : 0.0f;
        Floats squares = zero();
        for_vectors(width, [&](i64 k, auto some) {
            const Floats off = keep(sub(load(to + k, some), all(mean)), some);
            squares = fma(off, off, squares);
        });
        const double variance = static_cast<double>(sum(squares)) / static_cast<double>(width);
        const Floats scale = all(static_cast<float>(1.0 / std::sqrt(variance + eps)));
        for_vectors(width, [&](i64 k, auto some) {
            const Floats v = mul(mul(sub(load(to + k, some), all(mean)), scale), load(weight + k, some));
            store(to + k, bias == nullptr ? v : add(v, load(bias + k, some)), some);
        });
    }
}

// Write activation(gate) * up of rows whose first half is the gate.
template <int activation, class T>
void gate(const T* x, i64 rows, i64 width, T* out) {
    for (i64 r = 0; r < rows; r++)
        for_vectors(width, [&](i64 k, auto some) {
            const Floats up = load(x + (2 * r + 1) * width + k, some);
            store(out + r * width + k, mul(activate<activation, sizeof(T) == 2>(load(x + 2 * r * width + k, some)), up), some);
        });
}

}  // namespace whimbrel
