// Recurrent states of tokens: linear attention with decay, the gated delta rule, and selective state spaces.
#pragma once
#include "simd_types.h"

namespace quire {

// What the rows and columns of a state S [k_dim, v_dim] are multiplied with at each token.
enum class Decay : i32 {
    head = 0,     // one factor: decay [T, v_heads]
    row = 1,      // a factor per row: decay [T, v_heads, k_dim]
    channel = 2,  // exp(rates[k, v] * decay[t, v]): decay [T, v_heads, v_dim], rates [v_heads, k_dim, v_dim]
};

// S = decay * S, then S += k v'^T and out = S^T q, where v' is v, or beta * (v - S^T k) where beta is not null. All in f32.
struct RecurrenceJob {
    i32 k_heads, v_heads, k_dim, v_dim;  // v_heads is a multiple of k_heads, k_dim at most MAX_STATE_ROWS
    Decay kind;
    const float* q;      // [T, k_heads, k_dim]
    const float* k;      // the same
    const float* v;      // [T, v_heads, v_dim]
    const float* decay;
    const float* rates;  // null unless kind is channel
    const float* beta;   // [T, v_heads] or null; null where kind is channel
    float* out;          // [T, v_heads, v_dim]
};

// Where the state goes after so many tokens of a run.
struct StateSave {
    i64 count;
    float* to;  // [v_heads, k_dim, v_dim]
};

// The tokens of one sequence. saves are in rising order of their counts, 0 <= count <= num_tokens.
struct RecurrenceRun {
    i64 first, num_tokens;
    const float* source;  // [v_heads, k_dim, v_dim], or null: zeros
    const StateSave* saves;
    i32 num_saves;
};

// Columns of a state that are updated at a time. They lie on the stack, k_dim rows of them.
constexpr i32 STATE_COLUMNS = 64, MAX_STATE_ROWS = 256;

// Taps of a convolution, at most; and channels that one thread takes at a time.
constexpr i32 MAX_CONV_TAPS = 8, CONV_CHANNELS = 64;

// A causal convolution of every channel over the tokens of a sequence: taps are summed in order, the bias last, in f32.
struct ConvJob {
    i32 channels, taps;
    bool is_bf16;         // states keep the last taps - 1 inputs in bf16, to which inputs are rounded first; otherwise in f32
    const float* x;       // rows of inputs, `stride` apart
    const float* weight;  // [taps][channels], the last tap is that of the token itself
    const float* bias;    // [channels] or null
    float* out;           // rows, out_stride apart
    i64 stride, out_stride;
};

struct ConvSave {
    i64 count;
    u8* to;  // [taps - 1][channels], oldest first
};

// As RecurrenceRun.
struct ConvRun {
    i64 first, num_tokens;
    const u8* source;
    const ConvSave* saves;
    i32 num_saves;
};

struct RecurrenceTable {
    // Take columns [first, first + count) of one head's state through a run, count <= STATE_COLUMNS. Every column depends on
    // itself only, and tokens follow one another: the bits do not depend on where runs are cut. Reads its part of source before
    // it writes one of saves.
    void (*run)(const RecurrenceJob& job, const RecurrenceRun& run, i32 head, i32 first, i32 count);
    // Convolve channels [first, first + count) of a run. Reads its part of source before it writes one of saves.
    void (*convolve)(const ConvJob& job, const ConvRun& run, i32 first, i32 count);
};

}  // namespace quire
