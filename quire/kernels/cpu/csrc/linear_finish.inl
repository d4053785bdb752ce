// What becomes of a tile's sums: scales, biases, gates, residuals, the best of a head, or the input of the next layer.
namespace quire::QUIRE_ISA {
namespace {

// What a panel's results are multiplied with and added to.
struct Scaling {
    bool has_scale, has_bias;
    F32 scale, bias;

    F32 operator()(const float* tile) const {
        F32 y = load(tile);
        if (has_scale) y = y * scale;
        if (has_bias) y = y + bias;
        return y;
    }
};

QUIRE_INLINE Scaling scaling_of(const Weight& w, i32 panel) {
    Scaling s = {w.column_scale != nullptr, w.bias != nullptr, zero(), zero()};
    if (s.has_scale) s.scale = load(w.column_scale + panel * 16);
    if (s.has_bias) s.bias = load(w.bias + panel * 16);
    return s;
}

void keep_best(const LinearJob& job, i64 at, i32 panel, Mask lanes, F32 y) {
    float values[16];
    store(values, y);
    float best = job.best_value[at];
    i32 index = job.best_index[at];
    // NaN beats all, so that whoever looks at the value sees it; of equal values the lower index, whichever came first.
    for (int i = 0; i < 16; ++i) {
        if (!(bits(lanes) >> i & 1)) continue;
        const i32 n = panel * 16 + i;
        const bool is_better = values[i] > best || (values[i] == best && n < index) || (values[i] != values[i] && best == best);
        if (is_better || index < 0) best = values[i], index = n;
    }
    job.best_value[at] = best;
    job.best_index[at] = index;
}

QUIRE_INLINE F32 gated(const LinearJob& job, F32 y, F32 y2) {
    return job.limit > 0.0f ? clamped_gate(y, y2, job.limit, job.slope) : activate(job.activation, y) * y2;
}

// Finish one panel of a tile whose result is the input of the next layer: as pack_rows would write it from `out`.
void pack_panel(const LinearJob& job, i32 panel, TilePlace place, const float* y, const float* y2) {
    const Packed& to = *job.packed;
    const i32 word = panel * 8, num_words = smaller(steps_of(to.kind, to.k) - word, 8);
    const Mask lanes = first_lanes(job.weight->n - panel * 16);
    const Scaling scaled = scaling_of(*job.weight, panel), second = job.finish == Finish::gate ? scaling_of(*job.second, panel) : Scaling();
    I32 words[16];
    for (i32 r = 0, together; r < place.rows; r += together) {
        const RowPlace at = place_of(to, place.first_row + r);
        together = smaller(smaller(at.rows - at.r, 16), place.rows - r);
        for (i32 i = 0; i < together; ++i) {
            F32 value = scaled(y + (r + i) * 16);
            value = job.finish == Finish::gate ? gated(job, value, second(y2 + (r + i) * 16)) : activate(job.activation, value);
            words[i] = bf16_words(select(lanes, value, zero()), zero());
        }
        store_columns(word_at(to, at, word), at.rows, words, together, num_words);
    }
}

// Finish one panel of a tile: y and, for gate, y2 are [R][16].
void finish_panel(const Worker& worker, const LinearJob& job, i32 panel, TilePlace place, const float* y, const float* y2) {
    if (job.packed != nullptr) return pack_panel(job, panel, place, y, y2);
    const Weight& w = *job.weight;
    const Mask lanes = first_lanes(w.n - panel * 16);
    const Scaling scaled = scaling_of(w, panel);
    float* out = job.out + place.first_row * job.out_stride + panel * 16;
    switch (job.finish) {
        case Finish::best:
            for (i32 r = 0; r < place.rows; ++r) {
                const F32 value = scaled(y + r * 16);
                const i64 at = static_cast<i64>(place.first_row + r) * worker.size + worker.rank;
                // Almost every panel holds nothing better.
                const Mask better = (value > set1(job.best_value[at])) | is_nan(value);
                if (job.best_index[at] < 0 || bits(better & lanes) != 0 || job.best_index[at] > panel * 16)
                    keep_best(job, at, panel, lanes, value);
            }
            break;
        case Finish::store:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, scaled(y + r * 16), lanes);
            break;
        case Finish::add:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, fma(set1(job.factor), scaled(y + r * 16), load(out, lanes)), lanes);
            break;
        case Finish::multiply:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, scaled(y + r * 16) * load(out, lanes), lanes);
            break;
        case Finish::activate:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, activate(job.activation, scaled(y + r * 16)), lanes);
            break;
        case Finish::gate: {
            const Scaling second = scaling_of(*job.second, panel);
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, gated(job, scaled(y + r * 16), second(y2 + r * 16)), lanes);
            break;
        }
    }
}

// Whether tiles write the results of a job where they belong.
QUIRE_INLINE bool is_direct(const LinearJob& job) {
    const Weight& w = *job.weight;
    return job.finish == Finish::store && !is_integer(w.format) && w.column_scale == nullptr && w.bias == nullptr && w.n % 16 == 0;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
