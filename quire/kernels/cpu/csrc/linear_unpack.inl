// One row of a packed weight as f32: an embedding.
namespace quire::QUIRE_ISA {
namespace {

// The scale and offset of group g of output n, as f32.
QUIRE_INLINE float group_value(const u16* values, i64 groups, i32 n, i32 g, float otherwise) {
    if (values == nullptr) return otherwise;
    float lanes[16];
    store(lanes, load_f16(values + ((n / 16) * groups + g) * 16));
    return lanes[n % 16];
}

void unpack_row(const Weight& w, i32 n, float* out) {
    if (w.format == Format::bf12) return unpack_units(w, n, out);
    if (is_float8(w.format)) return unpack_float8(w, n, out);
    const u8* panel = w.data + (n / 16) * w.panel_bytes;
    const i32 lane = n % 16;
    if (!is_integer(w.format)) {
        for (i32 k = 0; k < w.k; ++k) {
            u32 word = 0;
            if (w.format == Format::f16) {
                float lanes[16];
                store(lanes, load_f16(reinterpret_cast<const u16*>(panel) + static_cast<i64>(k) * 16));
                __builtin_memcpy(&word, lanes + lane, 4);
            } else if (w.format == Format::f32)
                __builtin_memcpy(&word, panel + static_cast<i64>(k) * 64 + lane * 4, 4);
            else
                __builtin_memcpy(
                    reinterpret_cast<u8*>(&word) + 2, panel + static_cast<i64>(k / 2) * 64 + lane * 4 + (k % 2) * 2, 2);
            __builtin_memcpy(out + (w.columns == nullptr ? k : w.columns[k]), &word, 4);
        }
        return;
    }
    const i64 groups = groups_of(w.k, w.group);
    const float column = w.column_scale == nullptr ? 1.0f : w.column_scale[n];
    for (i32 g = 0; g < groups; ++g) {
        const float scale = group_value(w.group_scales, groups, n, g, 1.0f),
                    offset = group_value(w.group_offsets, groups, n, g, 0.0f);
        const i32 stop = (g + 1) * w.group < w.k ? (g + 1) * w.group : w.k;
        for (i32 k = g * w.group; k < stop; ++k) {
            u8 code;
            if (w.format == Format::u8) {
                code = panel[static_cast<i64>(k / 4) * 64 + lane * 4 + k % 4];
            } else {
                const u8 both = panel[static_cast<i64>(k / 8) * 64 + lane * 4 + k % 4];
                code = w.table[k % 8 < 4 ? both & 15 : both >> 4];
            }
            const float value = (scale * static_cast<float>(static_cast<i32>(code) - 128) + offset) * column;
            out[w.columns == nullptr ? k : w.columns[k]] = value;
        }
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
