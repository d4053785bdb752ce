// Products of LoRA adapters: matrices of few rows in the layout of linear layers, and rows of f32. Each output is summed over
// even and odd inputs, then over both, whatever the number of rows.
namespace quire::QUIRE_ISA {
namespace {

// Rows that are computed together, two accumulators each: MAX_LOW_RANK_ROWS, or up to MAX_LOW_RANK_ROWS / 2.
constexpr int MAX_LOW_RANK_ROWS = QUIRE_HAS_512 ? 8 : 2;
constexpr i64 LOW_RANK_BYTES_AHEAD = 2048;

struct WeightPair {
    F32 first, second;
};

// Weights of inputs 2j and 2j + 1 of a panel from `line` on; where is_last, the second does not exist.
struct Bf16Weights {
    static constexpr i64 PAIR_BYTES = 64;
    static WeightPair load_pair(const u8* line, bool) {
        const I32 pair = load(reinterpret_cast<const i32*>(line));
        return {as_f32(shift_left<16>(pair)), as_f32(pair & set1(static_cast<i32>(0xffff0000u)))};
    }
};
struct F16Weights {
    static constexpr i64 PAIR_BYTES = 64;
    static WeightPair load_pair(const u8* line, bool is_last) {
        const u16* const values = reinterpret_cast<const u16*>(line);
        return {load_f16(values), is_last ? zero() : load_f16(values + 16)};
    }
};
struct F32Weights {
    static constexpr i64 PAIR_BYTES = 128;
    static WeightPair load_pair(const u8* line, bool is_last) {
        const float* const values = reinterpret_cast<const float*>(line);
        return {load(values), is_last ? zero() : load(values + 16)};
    }
};

// The outputs of a panel of a dense weight for R rows; is_added: they are added to what is at `out`.
template <int R, class Weights>
QUIRE_INLINE void low_rank_rows(const Weight& w, i32 panel, const float* const* x, float* const* out, bool is_added) {
    F32 even[R], odd[R];
    const float* row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) even[r] = zero(), odd[r] = zero(), row[r] = x[r];
    const i32 num_pairs = w.k / 2;
    const u8* line = w.data + panel * w.panel_bytes;
    for (i32 j = 0; j < num_pairs; ++j, line += Weights::PAIR_BYTES) {
        prefetch_l2(line + LOW_RANK_BYTES_AHEAD);
        const WeightPair weights = Weights::load_pair(line, false);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            even[r] = fma(weights.first, set1(row[r][2 * j]), even[r]);
            odd[r] = fma(weights.second, set1(row[r][2 * j + 1]), odd[r]);
        }
    }
    if (w.k % 2 != 0) {
        const F32 last = Weights::load_pair(line, true).first;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) even[r] = fma(last, set1(row[r][w.k - 1]), even[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const F32 y = even[r] + odd[r];
        store(out[r], is_added ? load(out[r]) + y : y);
    }
}

template <int R>
void low_rank_of(const Weight& w, i32 panel, const float* const* x, float* const* out, bool is_added) {
    switch (w.format) {
        case Format::bf16: return low_rank_rows<R, Bf16Weights>(w, panel, x, out, is_added);
        case Format::f16: return low_rank_rows<R, F16Weights>(w, panel, x, out, is_added);
        default: return low_rank_rows<R, F32Weights>(w, panel, x, out, is_added);
    }
}

// The same for any number of rows.
void low_rank_panel(const Weight& w, i32 panel, i32 count, const float* const* x, float* const* out, bool is_added) {
    for (i32 done = 0, together; done < count; done += together, x += together, out += together) {
        together = count - done >= MAX_LOW_RANK_ROWS ? MAX_LOW_RANK_ROWS : smaller(count - done, MAX_LOW_RANK_ROWS / 2);
        switch (together) {
            case 1: low_rank_of<1>(w, panel, x, out, is_added); break;
            case 2: low_rank_of<2>(w, panel, x, out, is_added); break;
#if QUIRE_HAS_512
            case 3: low_rank_of<3>(w, panel, x, out, is_added); break;
            case 4: low_rank_of<4>(w, panel, x, out, is_added); break;
            default: low_rank_of<8>(w, panel, x, out, is_added); break;
#endif
        }
    }
}

void shrink(const Weight& a, i32 panel, i32 count, const float* const* x, float* const* out) {
    low_rank_panel(a, panel, count, x, out, false);
}

// Prefetch what a panel's epilogue reads, while the panel is computed.
QUIRE_INLINE void prefetch_low_rank(const LowRankSum* sum, i32 panel) {
    for (i32 i = 0; sum != nullptr && i < sum->num_used; ++i) {
        const Weight* const b = sum->used[i][sum->index].b;
        for (i64 at = 0; b != nullptr && at < b->panel_bytes; at += 64) prefetch_l2(b->data + panel * b->panel_bytes + at);
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
