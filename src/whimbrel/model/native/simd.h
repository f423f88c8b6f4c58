// Vectors of the instruction set that this library is compiled for, and functions of them.
//
// The compiler is told the file of the backend (compile.py). Only backends have intrinsics. Their operations bear
// Highway's names, with a capital; functions made of them are in lower case.
#pragma once

#include WHIMBREL_BACKEND

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

namespace whimbrel {

constexpr float LOG_OF_E = 1.44269504f;  // of base 2

inline Floats LoadU(const bf16* p) { return LoadN(p, W); }
inline void StoreU(Floats x, bf16* p) { StoreN(x, p, W); }
template <class T>
inline Floats LoadN(const T* p, Whole) {
    return LoadU(p);
}
template <class T>
inline void StoreN(Floats x, T* p, Whole) {
    StoreU(x, p);
}
inline Whole FirstN(Whole all) { return all; }
inline Floats IfThenElse(Whole, Floats yes, Floats) { return yes; }
inline Floats IfThenElseZero(Whole, Floats yes) { return yes; }

// Call f(k, elements) for each vector of n elements; only the last may have fewer than W.
template <class F>
inline void for_vectors(i64 n, F f) {
    i64 k = 0;
    for (; k + W <= n; k += W) f(k, Whole{});
    if (k < n) f(k, n - k);
}

// e^x to about one unit in the last place. Below -104 it is 0, above 88.7 infinity.
inline Floats exponential(Floats x) {
    x = Max(Set(-120.0f), Min(Set(89.0f), x));
    const Floats n = Round(Mul(x, Set(LOG_OF_E)));
    Floats r = MulAdd(n, Set(-0.693359375f), x);
    r = MulAdd(n, Set(2.12194440e-4f), r);
    Floats p = Set(1.9875691500e-4f);
    p = MulAdd(p, r, Set(1.3981999507e-3f));
    p = MulAdd(p, r, Set(8.3334519073e-3f));
    p = MulAdd(p, r, Set(4.1665795894e-2f));
    p = MulAdd(p, r, Set(1.6666665459e-1f));
    p = MulAdd(p, r, Set(5.0000001201e-1f));
    return MulByPow2(Add(MulAdd(Mul(p, r), r, r), Set(1.0f)), n);
}

// 2^x of x up to 0, to about one unit in the last place. Below -126.5 it is 0.
inline Floats decay(Floats x) {
    // A sum with it is whole, and its lowest bits are those of a power's exponent.
    constexpr float WHOLE = 0x1.8p23f + 127.0f;
    x = Max(Set(-127.0f), x);
    const Floats shifted = Add(x, Set(WHOLE)), f = Sub(x, Sub(shifted, Set(WHOLE)));
    Floats p = MulAdd(f, Set(1.535336196e-4f), Set(1.339887502e-3f));
    p = MulAdd(p, f, Set(9.618436918e-3f));
    p = MulAdd(p, f, Set(5.550332367e-2f));
    p = MulAdd(p, f, Set(2.402264774e-1f));
    p = MulAdd(p, f, Set(6.931471825e-1f));
    p = MulAdd(p, f, Set(1.0f));
    return Mul(p, ShiftBitsLeft<23>(shifted));
}

// Compute factor * 2^x within 3e-6 of its size. Below -200 it is 0. From 128 it is infinity with AVX-512; with AVX2 it
// stays factor * 2^127.
inline Floats rough_power_of_2(Floats x, float factor = 1.0f) {
    x = ClampExponent(x);
    const Floats f = AboveFloor(x);
    Floats p = MulAdd(f, Set(factor * 1.353416778e-2f), Set(factor * 5.201146007e-2f));
    p = MulAdd(p, f, Set(factor * 2.414427549e-1f));
    p = MulAdd(p, f, Set(factor * 6.930038333e-1f));
    p = MulAdd(p, f, Set(factor * 1.000002623f));
    return MulByFloorPow2(p, x);
}

// Exponent of a positive normal number. Smaller ones have -127, infinity 128.
inline int exponent_of(float x) {
    i32 bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (bits >> 23) - 127;
}

// 2^n, for n from -126 to 127.
inline float power_of_2(int n) {
    const i32 bits = (n + 127) << 23;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float inverse_of_power(float power_of_two) { return power_of_2(-exponent_of(power_of_two)); }

// Power of 2 that makes a number of this magnitude at least 2^exponent and less than twice that. 1 for 0.
inline float power_to_reach(int exponent, float magnitude) {
    if (magnitude == 0.0f) return 1.0f;
    return power_of_2(exponent - std::max(-100, std::min(127, exponent_of(magnitude))));
}

// The largest magnitude among n numbers. NaN is passed over.
template <class T>
inline float largest_magnitude(const T* x, i64 n) {
    Floats most = Zero();
    for_vectors(n, [&](i64 k, auto some) { most = Max(Abs(LoadN(x + k, some)), most); });
    return ReduceMax(most);
}

// Memory of a thread that is kept between calls. It grows to the largest size asked for. Throws std::bad_alloc.
template <int slot>
inline void* scratch(std::size_t bytes) {
    struct Block {
        void* memory = nullptr;
        std::size_t size = 0;
        ~Block() { std::free(memory); }
    };
    thread_local Block block;
    if (bytes > block.size) {
        std::free(block.memory);
        block.size = (bytes + 4095) / 4096 * 4096;
        block.memory = std::aligned_alloc(64, block.size);
        if (block.memory == nullptr) {
            block.size = 0;
            throw std::bad_alloc();
        }
    }
    return block.memory;
}

}  // namespace whimbrel
