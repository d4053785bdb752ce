// The argmax prefilter (argmax_prefilter.h): the int8 copy of a head, the error of a quantised row, and the candidate panels of a
// row.
namespace quire::QUIRE_ISA {
namespace {

// Values smaller than this are lost in sums of squares.
constexpr float LOST = 1e-18f;
constexpr float HALF_ULP = 1.0f / (1 << 24);

// Relative bound of the rounding error of a computed length.
QUIRE_INLINE float length_slack(i32 k) { return 1.0f + 1.0f / 1024 + static_cast<float>(k) / (1 << 22); }
QUIRE_INLINE float lost_length(i32 k) { return LOST * __builtin_sqrtf(static_cast<float>(k)); }

// Input k of the sixteen outputs of a panel; `lines` of bf12 are expanded.
template <Format FORMAT>
QUIRE_INLINE F32 outputs_at(const u8* lines, i32 k) {
    if constexpr (FORMAT == Format::f32) return load(reinterpret_cast<const float*>(lines) + static_cast<i64>(k) * 16);
    if constexpr (FORMAT == Format::f16) return load_f16(reinterpret_cast<const u16*>(lines) + static_cast<i64>(k) * 16);
    const I32 pairs = load(reinterpret_cast<const i32*>(lines + static_cast<i64>(k / 2) * 64));
    return as_f32(k % 2 == 0 ? shift_left<16>(pairs) : pairs & set1(static_cast<i32>(0xffff0000u)));
}

template <Format FORMAT>
void copy_panel(const Weight& head, const u8* lines, i32 panel, const Int8HeadPanels& to) {
    const F32 factor = head.column_scale == nullptr ? set1(1.0f) : load(head.column_scale + panel * 16);
    const i32 k = head.k;
    F32 largest = zero();
    for (i32 j = 0; j < k; ++j) largest = max(largest, abs(outputs_at<FORMAT>(lines, j) * factor));
    // Values so small that their scale would be denormal get the code 0.
    const Mask is_small = largest < set1(1e-30f);
    const F32 scale = select(is_small, zero(), largest / set1(127.0f)),
              inverse = select(is_small, zero(), set1(127.0f) / largest), minus = zero() - scale;
    F32 off = zero(), size = zero();
    u8* const codes = to.codes + panel * to.panel_bytes;
    for (i64 line = 0; line < to.panel_bytes / 64; ++line) {
        I32 word = set1(0);
        for (int i = 0; i < 4; ++i) {
            const i32 j = static_cast<i32>(line) * 4 + i;
            const F32 value = j < k ? outputs_at<FORMAT>(lines, j) * factor : zero();
            const I32 code = to_i32(value * inverse);
            const F32 copied = scale * to_f32(code), left = fma(minus, to_f32(code), value);
            off = fma(left, left, off);
            size = fma(copied, copied, size);
            const I32 byte = (code + set1(128)) & set1(255);
            word = word | (i == 0 ? byte : i == 1 ? shift_left<8>(byte) : i == 2 ? shift_left<16>(byte) : shift_left<24>(byte));
        }
        store(reinterpret_cast<i32*>(codes + line * 64), word);
    }
    off = sqrt(off);
    size = sqrt(size);
    const F32 rounding = set1(static_cast<float>(k + ceil_div(k, to.group) + 16) * HALF_ULP), slack = set1(length_slack(k));
    store(to.scale + panel * 16, scale);
    store(to.error + panel * 16, fma(fma(rounding, off + size, off), slack, set1(lost_length(k))));
    store(to.size + panel * 16, size * slack);
}

void copy_panels(const Weight& head, i32 first, i32 last, const Int8HeadPanels& to) {
    for (i32 panel = first; panel < last; ++panel) {
        const u8* lines = head.data + panel * head.panel_bytes;
        switch (head.format) {
            case Format::f32: copy_panel<Format::f32>(head, lines, panel, to); break;
            case Format::f16: copy_panel<Format::f16>(head, lines, panel, to); break;
            case Format::bf12: expand_panel(head, panel, to.lines); copy_panel<Format::bf16>(head, to.lines, panel, to); break;
            default: copy_panel<Format::bf16>(head, lines, panel, to); break;
        }
    }
}

// The length of a row as the head reads it, and the length of its quantisation error.
void measure_row(const Packed& bytes, i32 row, const float* values, Format kind, float* size, float* error) {
    const RowPlace place = place_of(bytes, row);
    const i32 k = bytes.k, num_words = steps_of(Format::u8, k), num_scales = groups_of(k, bytes.input_group);
    const float* const scales = bytes.scales + static_cast<i64>(place.first) * num_scales + place.r;
    F32 off = zero(), whole = zero();
    for (i32 j = 0; j < k; j += 16) {
        F32 value = load(values + j, first_lanes(k - j));
        if (kind == Format::bf16) {
            u16 rounded[16];
            store_bf16(rounded, value);
            value = load_bf16(rounded);
        }
        i8 codes[16] = {};
        for (i32 w = 0; w < 4 && j / 4 + w < num_words; ++w) __builtin_memcpy(codes + 4 * w, word_at(bytes, place, j / 4 + w), 4);
        const F32 left = fma(set1(-scales[static_cast<i64>(j / bytes.input_group) * place.rows]), load_s8(codes), value);
        off = fma(left, left, off);
        whole = fma(value, value, whole);
    }
    const float slack = length_slack(k), lost = lost_length(k);
    const float length = sum_lanes(whole), distance = sum_lanes(off);
    *size = __builtin_sqrtf(length) * slack + lost;
    *error = (__builtin_sqrtf(distance) + static_cast<float>(num_scales + 16) * HALF_ULP * (*size)) * slack + lost;
}

// Remove the candidates that cannot be the best; return whether there is room again.
bool drop_candidates(Candidate* kept, i32 room, i32& count, float least) {
    i32 left = 0;
    for (i32 i = 0; i < count; ++i)
        if (kept[i].most >= least) kept[left++] = kept[i];
    count = left;
    return left <= room / 2;
}

// Process a panel of the copy's outputs, [R][16].
void prefilter_panel(const Worker& worker, const LinearJob& job, i32 panel, i32 first_row, i32 rows, const Mask& lanes,
    const F32& scale, const float* y) {
    const PrefilterRows& state = *job.prefilter;
    const F32 error = load(state.error + panel * 16), size = load(state.size + panel * 16);
    for (i32 r = 0; r < rows; ++r) {
        const i64 row = first_row + r, at = row * worker.size + worker.rank;
        if (state.count[at] < 0) continue;
        const F32 value = load(y + r * 16) * scale;
        const F32 off = fma(error, set1(state.row_size[row]), size * set1(state.row_error[row]));
        const F32 most = value + off;
        if (bits((most >= set1(state.least[at])) & lanes) == 0) continue;
        const F32 lowest = set1(-__builtin_inff());
        const float sure = max_lanes(select(lanes, value - off, lowest));
        if (sure > state.least[at]) state.least[at] = sure;
        Candidate* const kept = state.kept + at * state.room;
        i32& count = state.count[at];
        if (count == state.room && !drop_candidates(kept, state.room, count, state.least[at])) {
            count = -1;
            continue;
        }
        kept[count++] = {panel, max_lanes(select(lanes, most, lowest))};
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
