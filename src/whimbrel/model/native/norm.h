// Layer norm and RMS norm of rows, after an optional addition, in one pass over memory; RMS norm and rotation of heads;
// gates.
#pragma once

#include <cmath>

#include "simd.h"
#include "structs.h"

namespace whimbrel {

// Write norm(x + y) * weight + bias as float32, row by row. `y` and `bias` may be null. `out` may be `x`.
template <bool centred, class Y>
void norm(const float* x, const Y* y, const float* weight, const float* bias, double eps, i64 rows, i64 width,
          float* out) {
    for (i64 r = 0; r < rows; r++) {
        const float* in = x + r * width;
        float* to = out + r * width;
        Floats total = Zero();
        for_vectors(width, [&](i64 k, auto some) {
            Floats v = LoadN(in + k, some);
            if (y != nullptr) v = Add(v, LoadN(y + r * width + k, some));
            StoreN(v, to + k, some);
            if constexpr (centred) total = Add(total, v);
        });
        const float mean = centred ? ReduceSum(total) / static_cast<float>(width) : 0.0f;
        Floats squares = Zero();
        for_vectors(width, [&](i64 k, auto some) {
            const Floats off = IfThenElseZero(FirstN(some), Sub(LoadN(to + k, some), Set(mean)));
            squares = MulAdd(off, off, squares);
        });
        const double variance = static_cast<double>(ReduceSum(squares)) / static_cast<double>(width);
        const Floats scale = Set(static_cast<float>(1.0 / std::sqrt(variance + eps)));
        for_vectors(width, [&](i64 k, auto some) {
            const Floats v = Mul(Mul(Sub(LoadN(to + k, some), Set(mean)), scale), LoadN(weight + k, some));
            StoreN(bias == nullptr ? v : Add(v, LoadN(bias + k, some)), to + k, some);
        });
    }
}

// Write the RMS norm of heads, turned by their row's angles. `weight` has a number for each number of a row, or is
// null: no norm.
template <class T>
void norm_and_rotate(const T* x, i64 x_stride, i64 rows, i64 heads, i64 width, const float* weight, double eps,
                     const Rotation& by, T* out) {
    auto* head = static_cast<float*>(scratch<3>(sizeof(float) * static_cast<std::size_t>(up_to(width, W))));
    for (i64 r = 0; r < rows; r++)
        for (i64 n = 0; n < heads; n++) {
            const T* in = x + r * x_stride + n * width;
            T* to = out + (r * heads + n) * width;
            Floats squares = Zero();
            for_vectors(width, [&](i64 k, auto some) {
                const Floats v = LoadN(in + k, some);
                StoreN(v, head + k, some);
                if (weight != nullptr) squares = MulAdd(v, v, squares);
            });
            if (weight != nullptr) {
                const double mean = static_cast<double>(ReduceSum(squares)) / static_cast<double>(width);
                const Floats scale = Set(static_cast<float>(1.0 / std::sqrt(mean + eps)));
                for_vectors(width, [&](i64 k, auto some) {
                    StoreN(Mul(Mul(LoadN(head + k, some), scale), LoadN(weight + n * width + k, some)), head + k, some);
                });
            }
            for_vectors(by.pairs, [&](i64 k, auto some) {
                const Floats a = LoadN(head + k, some), b = LoadN(head + by.pairs + k, some);
                const Floats cos = LoadN(by.cos + r * by.pairs + k, some), sin = LoadN(by.sin + r * by.pairs + k, some);
                StoreN(Sub(Mul(a, cos), Mul(b, sin)), to + k, some);
                StoreN(Add(Mul(b, cos), Mul(a, sin)), to + by.pairs + k, some);
            });
            const i64 turned = 2 * by.pairs;
            for_vectors(width - turned,
                        [&](i64 k, auto some) { StoreN(LoadN(head + turned + k, some), to + turned + k, some); });
        }
}

// Write activation(gate) * up of rows whose first half is the gate.
template <int activation, class T>
void gate(const T* x, i64 rows, i64 width, T* out) {
    for (i64 r = 0; r < rows; r++)
        for_vectors(width, [&](i64 k, auto some) {
            const Floats up = LoadN(x + (2 * r + 1) * width + k, some);
            StoreN(Mul(activate<activation, sizeof(T) == 2>(LoadN(x + 2 * r * width + k, some)), up),
                   out + r * width + k, some);
        });
}

}  // namespace whimbrel
