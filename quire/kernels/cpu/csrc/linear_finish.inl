// The epilogue of a tile: scales, biases, gates, residuals, the argmax of a head, or the input of the next layer.
namespace quire::QUIRE_ISA {
namespace {

// Scales and offsets of a panel's results.
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

QUIRE_INLINE bool has_low_rank(const LinearJob& job) { return job.low_rank != nullptr || job.second_low_rank != nullptr; }

void keep_best(const LinearJob& job, i64 at, i32 panel, Mask lanes, F32 y) {
    float values[16];
    store(values, y);
    float best = job.best_value[at];
    i32 index = job.best_index[at];
    // NaN is larger than all values, so that it is noticed; of equal values the lower index is chosen, in any order.
    for (int i = 0; i < 16; ++i) {
        if (!(bits(lanes) >> i & 1)) continue;
        const i32 n = panel * 16 + i;
        const bool is_better = values[i] > best || (values[i] == best && n < index) || (values[i] != values[i] && best == best);
        if (is_better || index < 0) best = values[i], index = n;
    }
    job.best_value[at] = best;
    job.best_index[at] = index;
}

// Update with a panel of one row. Almost no panel has a better value.
QUIRE_INLINE void note_best(const LinearJob& job, i64 at, i32 panel, Mask lanes, F32 value) {
    const Mask better = (value > set1(job.best_value[at])) | is_nan(value);
    if (job.best_index[at] < 0 || bits(better & lanes) != 0 || job.best_index[at] > panel * 16)
        keep_best(job, at, panel, lanes, value);
}

// y = activation(y), then, for gate, y *= y2, of the rows of a panel [R][16]: scaled, and with their bias, unless they are so.
// One loop per activation: selecting it for each row would take a significant part of the time.
void activate_rows(const LinearJob& job, bool is_scaled, i32 panel, i32 rows, float* y, const float* y2) {
    const bool is_gate = job.finish == Finish::gate;
    const Scaling none = {false, false, zero(), zero()};
    const Scaling first = is_scaled ? none : scaling_of(*job.weight, panel),
                  second = is_scaled || !is_gate ? none : scaling_of(*job.second, panel);
    const auto each_row = [=](auto value) QUIRE_BODY {
        for (i32 r = 0; r < rows; ++r) store(y + r * 16, value(first(y + r * 16), y2 + r * 16));
    };
    const auto with = [=](auto function) QUIRE_BODY {
        if (is_gate)
            each_row([=](F32 x, const float* beside) QUIRE_BODY { return function(x) * second(beside); });
        else
            each_row([=](F32 x, const float*) QUIRE_BODY { return function(x); });
    };
    if (is_gate && job.limit > 0.0f)
        return each_row(
            [=, &job](F32 x, const float* beside) QUIRE_BODY { return clamped_gate(x, second(beside), job.limit, job.slope); });
    switch (job.activation) {
        case Activation::silu: return with([](F32 x) QUIRE_BODY { return silu(x); });
        case Activation::gelu: return with([](F32 x) QUIRE_BODY { return gelu(x); });
        case Activation::gelu_tanh: return with([](F32 x) QUIRE_BODY { return gelu_tanh(x); });
        case Activation::relu: return with([](F32 x) QUIRE_BODY { return relu(x); });
        case Activation::relu2: return with([](F32 x) QUIRE_BODY { return relu2(x); });
        case Activation::xielu: {
            const float positive = job.positive, negative = job.negative;
            return with([=](F32 x) QUIRE_BODY { return xielu(x, positive, negative); });
        }
    }
}

// Write a panel of results as the packed input of the next layer, as pack_rows would from `out`.
void pack_panel(const LinearJob& job, i32 panel, TilePlace place, const float* y) {
    const Packed& to = *job.packed;
    const i32 word = panel * 8, num_words = smaller(steps_of(to.kind, to.k) - word, 8);
    const Mask lanes = first_lanes(job.weight->n - panel * 16);
    I32 words[16];
    for (i32 r = 0, together; r < place.rows; r += together) {
        const RowPlace at = place_of(to, place.first_row + r);
        together = smaller(smaller(at.rows - at.r, 16), place.rows - r);
        for (i32 i = 0; i < together; ++i) words[i] = dot_words(select(lanes, load(y + (r + i) * 16), zero()), zero());
        store_columns(word_at(to, at, word), at.rows, words, together, num_words);
    }
}

// Scale a panel of a tile [R][16], and add what the adapters of its rows add; sum null: nothing.
void add_low_rank(const LowRankSum* sum, const Scaling& scaled, i32 panel, TilePlace place, float* y) {
    for (i32 r = 0; r < place.rows && (scaled.has_scale || scaled.has_bias); ++r) store(y + r * 16, scaled(y + r * 16));
    if (sum == nullptr) return;
    const i32 last = place.first_row + place.rows;
    u64 done = 0;  // rows of the tile
    for (i32 row = place.first_row; row < last; ++row) {
        const LowRankWeights* const weights = sum->rows[row];
        if ((done >> (row - place.first_row) & 1) != 0 || weights == nullptr || weights[sum->index].b == nullptr) continue;
        const float* x[MAX_LOW_RANK_ROWS];
        float* out[MAX_LOW_RANK_ROWS];
        i32 together = 0;
        for (i32 next = row; together < MAX_LOW_RANK_ROWS && next >= 0 && next < last; next = sum->next[next], ++together) {
            done |= u64{1} << (next - place.first_row);
            x[together] = sum->shrunk + next * sum->stride;
            out[together] = y + (next - place.first_row) * 16;
        }
        low_rank_panel(*weights[sum->index].b, panel, together, x, out, true);
    }
}

// Finish one panel of a tile: y and, for gate, y2 are [R][16].
void finish_panel(const Worker& worker, const LinearJob& job, i32 panel, TilePlace place, float* y, float* y2) {
    const bool is_activated = job.finish == Finish::activate || job.finish == Finish::gate, is_scaled = has_low_rank(job);
    if (is_scaled) add_low_rank(job.low_rank, scaling_of(*job.weight, panel), panel, place, y);
    if (is_scaled && job.finish == Finish::gate)
        add_low_rank(job.second_low_rank, scaling_of(*job.second, panel), panel, place, y2);
    if (is_activated) activate_rows(job, is_scaled, panel, place.rows, y, y2);
    if (job.packed != nullptr) return pack_panel(job, panel, place, y);
    const Weight& w = *job.weight;
    const Mask lanes = first_lanes(w.n - panel * 16);
    const Scaling scaled = is_scaled ? Scaling{false, false, zero(), zero()} : scaling_of(w, panel);
    float* out = job.out + place.first_row * job.out_stride + panel * 16;
    switch (job.finish) {
        case Finish::best:
            for (i32 r = 0; r < place.rows; ++r)
                note_best(
                    job, static_cast<i64>(place.first_row + r) * worker.size + worker.rank, panel, lanes, scaled(y + r * 16));
            break;
        case Finish::prefilter:
            prefilter_panel(worker, job, panel, place.first_row, place.rows, lanes, scaled.scale, y);
            break;
        case Finish::store:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, scaled(y + r * 16), lanes);
            break;
        case Finish::add:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride)
                store(out, fma(set1(job.factor), scaled(y + r * 16), load(out, lanes)), lanes);
            break;
        case Finish::multiply:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, scaled(y + r * 16) * load(out, lanes), lanes);
            break;
        case Finish::activate:
        case Finish::gate:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, load(y + r * 16), lanes);
            break;
    }
}

// Whether tiles write the results of a job directly to their destination.
QUIRE_INLINE bool is_direct(const LinearJob& job) {
    const Weight& w = *job.weight;
    return job.finish == Finish::store && !has_low_rank(job) && !is_integer(w.format) && w.column_scale == nullptr &&
        w.bias == nullptr && w.n % 16 == 0;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
