// From kinds, activations and types that are known when a kernel is called to the functions that are compiled for them.
//
// All throw std::bad_alloc if memory runs out.
#pragma once

#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "structs.h"

namespace whimbrel {

// Rows of bfloat16 if `narrow`, else of float32. The stride counts numbers.
struct Input {
    const void* data;
    bool narrow;
    i64 stride;
};
struct Output {
    void* data;
    bool narrow;
    i64 stride;
};

// Call f with a number of the type.
template <class F>
void with_type(bool narrow, F f) {
    if (narrow) f(bf16{});
    else f(float{});
}

inline void multiply(const Product& by, Input x, i64 rows, Output out) {
    with_numbers<InInt8, InBfloat16, InFloat16>(by.kind, [&](auto d) {
        with_type(x.narrow, [&](auto in) {
            with_type(out.narrow, [&](auto result) {
                using D = decltype(d);
                using In = decltype(in);
                using Out = decltype(result);
                constexpr Finish<D, Out> finishes[] = {
                    finish<D, IDENTITY, Out>, finish<D, GELU, Out>, finish<D, GELU_TANH, Out>,
                    finish<D, RELU, Out>,     finish<D, SILU, Out>,
                };
                linear<D>(finishes[by.activation], static_cast<const In*>(x.data), x.stride, rows, by.weight,
                          static_cast<Out*>(out.data), out.stride);
            });
        });
    });
}

// Scores of positions have no float16, which float32 replaces.
inline void attend_heads(const Attention& by) {
    const i64 kind = by.kind == FLOAT16 && by.positions != nullptr ? i64{FLOAT32} : by.kind;
    with_numbers<InBfloat16, InFloat16>(
        kind, [&](auto d) { with_type(by.narrow != 0, [&](auto t) { attend<decltype(d), decltype(t)>(by); }); });
}

// Write norm(x + added). `added` may be null.
inline void norm_rows(const Norm& by, const float* x, const void* added, bool narrow, i64 rows, i64 width, float* out) {
    with_type(narrow, [&](auto t) {
        const auto run = by.centred ? norm<true, decltype(t)> : norm<false, decltype(t)>;
        run(x, static_cast<const decltype(t)*>(added), by.weight, by.bias, by.eps, rows, width, out);
    });
}

// Heads of a row are contiguous. `out` is contiguous, and has the type of `x`.
inline void norm_and_rotate_heads(Input x, i64 rows, i64 heads, i64 width, const float* weight, double eps,
                                  const Rotation& by, void* out) {
    with_type(x.narrow, [&](auto t) {
        using T = decltype(t);
        norm_and_rotate(static_cast<const T*>(x.data), x.stride, rows, heads, width, weight, eps, by,
                        static_cast<T*>(out));
    });
}

// `x` and `out` are contiguous, and have one type.
inline void gate_rows(i64 activation, const void* x, bool narrow, i64 rows, i64 width, void* out) {
    with_type(narrow, [&](auto t) {
        using T = decltype(t);
        constexpr void (*gates[])(const T*, i64, i64, T*) = {
            gate<IDENTITY, T>, gate<GELU, T>, gate<GELU_TANH, T>, gate<RELU, T>, gate<SILU, T>,
        };
        gates[activation](static_cast<const T*>(x), rows, width, static_cast<T*>(out));
    });
}

}  // namespace whimbrel
