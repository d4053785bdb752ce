// Activation functions over sixteen lanes. Include after simd.h.
#pragma once
#include "weight.h"

namespace quire::QUIRE_ISA {
namespace {

// x / (1 + e^(-x)).
QUIRE_INLINE F32 silu(F32 x) { return x / (set1(1.0f) + exp_unflushed(zero() - x)); }

// x * P(X < x), X normal, to 3e-7 absolute and 3e-6 relative above -9: max(x, 0) - |x| Q(|x|) has no cancellation, where
// Q(a) = P(X > a) = e^(-a^2 / 2) t p(t), t = 1 / (1 + 0.305 a), and p was fitted to 1e-7 on [0, 14]; Q(14) is 0 in f32.
QUIRE_INLINE F32 gelu(F32 x) {
    const F32 a = min(set1(14.0f), abs(x));
    const F32 t = set1(1.0f) / fma(set1(0.305f), a, set1(1.0f));
    F32 p = set1(3.669930387e-2f);
    p = fma(p, t, set1(-1.529887914e-1f));
    p = fma(p, t, set1(1.857177377e-1f));
    p = fma(p, t, set1(-3.797760267e-2f));
    p = fma(p, t, set1(1.210220887e-1f));
    p = fma(p, t, set1(1.034207431e-1f));
    p = fma(p, t, set1(1.224668362e-1f));
    p = fma(p, t, set1(1.216397315e-1f));
    return max(zero(), x) - a * (p * t) * exp(a * a * set1(-0.5f));
}

// x (1 + tanh u) / 2 = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
QUIRE_INLINE F32 gelu_tanh(F32 x) {
    const F32 u = x * fma(x * x, set1(0.044715f * 0.797884561f), set1(0.797884561f));
    return x / (set1(1.0f) + exp_unflushed(u * set1(-2.0f)));
}

// max returns its second operand if x is NaN.
QUIRE_INLINE F32 relu(F32 x) { return max(zero(), x); }

QUIRE_INLINE F32 relu2(F32 x) {
    const F32 y = relu(x);
    return y * y;
}

// positive x^2 + x / 2 above zero, negative (e^min(x, -1e-6) - 1 - x) + x / 2 elsewhere.
QUIRE_INLINE F32 xielu(F32 x, float positive, float negative) {
    const F32 half = set1(0.5f) * x, bent = exp(min(set1(-1e-6f), x)) - set1(1.0f) - x;
    return half + select(x > zero(), set1(positive) * x * x, set1(negative) * bent);
}

// (u + 1) g / (1 + e^(-slope g)), g = min(x, limit), u = y between -limit and limit. NaN is kept, as the second operand.
QUIRE_INLINE F32 clamped_gate(F32 x, F32 y, float limit, float slope) {
    const F32 g = min(set1(limit), x), u = max(set1(-limit), min(set1(limit), y));
    return (u + set1(1.0f)) * (g / (set1(1.0f) + exp_unflushed(g * set1(-slope))));
}

}  // namespace
}  // namespace quire::QUIRE_ISA
