// Layer norm and RMS norm of rows, after an optional addition, in one pass over memory; RMS norm and rotation of heads; gates.
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

struct Rotation {
    const float *cos, *sin;  // (rows, pairs), or null
    i64 pairs;  // number k of a head is turned with number pairs + k; those after both halves are not
};

// Write the RMS norm of heads, turned by their row's angles. `weight` has a number for each number of a row, or is null: no norm.
template <class T>
void norm_and_rotate(const T* x, i64 x_stride, i64 rows, i64 heads, i64 width, const float* weight, double eps, const Rotation& by, T* out) {
    auto* head = static_cast<float*>(scratch<3>(sizeof(float) * static_cast<std::size_t>(up_to(width, W))));
    for (i64 r = 0; r < rows; r++)
        for (i64 n = 0; n < heads; n++) {
            const T* in = x + r * x_stride + n * width;
            T* to = out + (r * heads + n) * width;
            Floats squares = zero();
            for_vectors(width, [&](i64 k, auto some) {
                const Floats v = load(in + k, some);
                store(head + k, v, some);
                if (weight != nullptr) squares = fma(v, v, squares);
            });
            if (weight != nullptr) {
                const double mean = static_cast<double>(sum(squares)) / static_cast<double>(width);
                const Floats scale = all(static_cast<float>(1.0 / std::sqrt(mean + eps)));
                for_vectors(width, [&](i64 k, auto some) { store(head + k, mul(mul(load(head + k, some), scale), load(weight + n * width + k, some)), some); });
            }
            for_vectors(by.pairs, [&](i64 k, auto some) {
                const Floats a = load(head + k, some), b = load(head + by.pairs + k, some);
                const Floats cos = load(by.cos + r * by.pairs + k, some), sin = load(by.sin + r * by.pairs + k, some);
                store(to + k, sub(mul(a, cos), mul(b, sin)), some);
                store(to + by.pairs + k, add(mul(b, cos), mul(a, sin)), some);
            });
            const i64 turned = 2 * by.pairs;
            for_vectors(width - turned, [&](i64 k, auto some) { store(to + turned + k, load(head + turned + k, some), some); });
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
